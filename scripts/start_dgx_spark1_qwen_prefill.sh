#!/bin/sh
# DGX Spark 1: the prefill nodes of Qwen in the cluster file, on whatever machine they are.
# Another model: MODEL=NAME. One machine of several: --machine NAME.
exec "$(dirname "$0")/disagg" cluster up --role prefill --model "${MODEL:-qwen}" "$@"
