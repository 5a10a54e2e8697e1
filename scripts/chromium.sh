#!/bin/sh
# Bring a Chromium for the tests of the status page, if this machine has none and this is root on Debian or Ubuntu.
# CI and `make chromium` call this. The tests are skipped where there is none, so it never fails.
set -u

found() {
    [ -n "${CHROMIUM:-}" ] && return
    command -v chromium || command -v google-chrome || command -v google-chrome-stable || command -v chromium-browser
}

if found >/dev/null && command -v chromedriver >/dev/null; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "chromium: not found; the tests of the status page will be skipped (Debian: apt install chromium chromium-driver)"
    exit 0
fi

export DEBIAN_FRONTEND=noninteractive
lock=DPkg::Lock::Timeout=300 # another job may hold it
log=$(mktemp)
timeout 120 apt-get update -q -o "$lock" >"$log" 2>&1 # if it fails, the lists that are there may do
if timeout 600 apt-get install -q -y --no-install-recommends -o "$lock" chromium chromium-driver >>"$log" 2>&1; then
    echo "chromium: installed"
else
    tail -n 5 "$log"
    echo "chromium: could not be installed, see above; the tests of the status page will be skipped"
fi
rm -f "$log"
