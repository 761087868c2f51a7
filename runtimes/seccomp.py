"""A system call filter for sandboxes that share the host's kernel: what an agent's tools never need, and an attacker does.

Assembled by hand as classic BPF, so no library is needed. A refused call fails with EPERM; `clone3` "doesn't exist", so
that the C library falls back to `clone`, whose flags can be looked at. Foreign calling conventions (32 bit, x32) fail.
"""

from __future__ import annotations

import errno
import platform
import struct

# Name: numbers on (x86_64, aarch64); None where the call doesn't exist.
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    # other namespaces, mounts
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    # other processes' memory and handles
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    # the kernel's keyrings, programs, faults, counters: a long history of holes
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "userfaultfd": (323, 282), "perf_event_open": (298, 241), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "lookup_dcookie": (212, 18),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "fanotify_init": (300, 262),
    # the machine
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89), "syslog": (103, 116), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "vhangup": (153, 58), "iopl": (172, None), "ioperm": (173, None), "mbind": (237, 235),
    "set_mempolicy": (238, 237), "migrate_pages": (256, 238), "move_pages": (279, 239),
}  # fmt: skip
_ARCH = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CLONE, _CLONE3, _PTRACE = (56, 220), (435, 435), (101, 117)
_PTRACE_OTHERS = (16, 0x4206)  # ATTACH and SEIZE; a debugger may still start its own child
_MKNOD = ((133, None), (259, 33))  # mknod, mknodat: by the mode, argument 1 and 2
_NEW_NAMESPACES = 0x7E020000 | 0x80  # CLONE_NEW*, also time
_TIOCSTI = 0x5412  # typing into the terminal of whoever started the worker
_IOCTL = (16, 29)

_LD, _JEQ, _JGE, _JSET, _AND, _RET = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NR, _ARCH_AT, _ARGS = 0, 4, 16


def supported() -> bool:
    return platform.machine() in _ARCH


def program(machine: str | None = None) -> bytes:
    """The filter as an array of `struct sock_filter`. Raises KeyError on a machine that it isn't written for."""
    column, arch = _ARCH[machine or platform.machine()]
    out: list[tuple[int, int, int, int]] = []

    def emit(code: int, k: int, jt: int = 0, jf: int = 0) -> None:
        out.append((code, jt, jf, k))

    def refuse(number: int = errno.EPERM) -> None:
        emit(_RET, _ERRNO | number)

    def when(number: int | None, body: list[tuple[int, int, int, int]]) -> None:
        """`body` for one call; it ends in a return or falls through with the call's number loaded again."""
        if number is not None:
            emit(_JEQ, number, 0, len(body) + 1)
            out.extend(body)
            emit(_LD, _NR)

    fail = (_RET, 0, 0, _ERRNO | errno.EPERM)
    emit(_LD, _ARCH_AT)
    emit(_JEQ, arch, 1, 0)
    refuse()
    emit(_LD, _NR)
    if column == 0:
        emit(_JGE, 0x40000000, 0, 1)
        refuse(errno.ENOSYS)
    for numbers in _NUMBERS.values():
        if (n := numbers[column]) is not None:
            emit(_JEQ, n, 0, 1)
            refuse()
    emit(_JEQ, _CLONE3[column], 0, 1)
    refuse(errno.ENOSYS)
    # The flags of `clone` are its first argument on both machines.
    when(_CLONE[column], [(_LD, 0, 0, _ARGS), (_JSET, 0, 1, _NEW_NAMESPACES & ~0x80), fail])
    when(
        _PTRACE[column],
        [(_LD, 0, 0, _ARGS), *[i for r in _PTRACE_OTHERS for i in ((_JEQ, 0, 1, r), fail)]],
    )
    when(_IOCTL[column], [(_LD, 0, 0, _ARGS + 8), (_JEQ, 0, 1, _TIOCSTI), fail])
    for argument, numbers in enumerate(_MKNOD, start=1):
        device = [(_LD, 0, 0, _ARGS + 8 * argument), (_AND, 0, 0, 0o170000)]
        for kind in (0o020000, 0o060000):
            device += [(_JEQ, 0, 1, kind), fail]
        when(numbers[column], device)
    emit(_RET, _ALLOW)
    return b"".join(struct.pack("=HBBI", code, jt, jf, k) for code, jt, jf, k in out)
