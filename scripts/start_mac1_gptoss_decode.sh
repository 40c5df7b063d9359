#!/bin/sh
# Mac Studio 1: the decode nodes of GPT-OSS in the cluster file, on whatever machine they are.
# Another model: MODEL=NAME. One machine of several: --machine NAME.
exec "$(dirname "$0")/disagg" cluster up --role decode --model "${MODEL:-gpt-oss}" "$@"
