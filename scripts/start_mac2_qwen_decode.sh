#!/bin/sh
# Mac Studio 2: the decode nodes of Qwen in the cluster file, on whatever machine they are.
# Another model: MODEL=NAME. One machine of several: --machine NAME.
exec "$(dirname "$0")/disagg" cluster up --role decode --model "${MODEL:-qwen}" "$@"
