#!/usr/bin/env bash
# Runs fuzz targets one after the other, each for SECONDS (default 60), from the committed seeds: run.sh [SECONDS] [TARGET]...
# Needs a nightly toolchain; cargo-fuzz is installed when it is missing. What a target finds is in fuzz/artifacts/<target>.
set -euo pipefail
cd "$(dirname "$0")"
seconds=${1:-60}
shift || true
command -v cargo-fuzz >/dev/null || cargo install --locked cargo-fuzz
targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(cargo fuzz list)
for target in "${targets[@]}"; do
    mkdir -p "corpus/$target" "seeds/$target"
    echo "== $target"
    # The samples are documents of every kind; a target takes what it can use.
    cargo +nightly fuzz run "$target" "corpus/$target" "seeds/$target" ../libcoldsnap/tests/samples -- \
        -max_total_time="$seconds" -max_len=16384 -rss_limit_mb=1024 -timeout=5 -print_final_stats=1 -verbosity=0
done
