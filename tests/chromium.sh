#!/bin/sh
# Installs Debian's Chromium, its driver and a Japanese font, where they are missing and that can be done; says so where not.
set -eu
if command -v chromium > /dev/null && command -v chromedriver > /dev/null; then
    exit
fi
as_root=$(test "$(id -u)" = 0 || echo sudo)
if ! command -v apt-get > /dev/null || ! { $as_root apt-get update --quiet=2 && $as_root apt-get install --quiet=2 --yes \
    --no-install-recommends chromium chromium-driver fonts-noto-cjk; } > /dev/null; then
    echo "Chromium can't be installed here by apt-get. Install it and its driver: without them the tests are skipped."
fi
