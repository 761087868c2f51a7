#!/bin/sh
# Puts the packages of package-lock.json, node among them, into the folder $1 (for POLAR_JS_SDKS).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
cmp -s "$here/package-lock.json" "$1/.complete" && exit 0
rm -f "$1/.complete"
cp "$here/package.json" "$here/package-lock.json" "$1/"
(cd "$1" && npm ci --no-audit --no-fund --loglevel=error)
"$1/node_modules/.bin/node" --version
cp "$here/package-lock.json" "$1/.complete"
