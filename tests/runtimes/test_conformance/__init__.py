"""What every runtime promises, checked on each of them. All tests by one name: other suites run them on other sandboxes."""

from tests.runtimes.test_conformance.common import *  # noqa: F403
from tests.runtimes.test_conformance.test_asked import *  # noqa: F403
from tests.runtimes.test_conformance.test_commands import *  # noqa: F403
from tests.runtimes.test_conformance.test_files import *  # noqa: F403
from tests.runtimes.test_conformance.test_life import *  # noqa: F403
from tests.runtimes.test_conformance.test_network import *  # noqa: F403
from tests.runtimes.test_conformance.test_tricks import *  # noqa: F403
