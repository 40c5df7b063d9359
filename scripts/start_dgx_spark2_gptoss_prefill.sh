#!/bin/sh
# DGX Spark 2: the prefill nodes of GPT-OSS in the cluster file, on whatever machine they are.
# Another model: MODEL=NAME. One machine of several: --machine NAME.
exec "$(dirname "$0")/disagg" cluster up --role prefill --model "${MODEL:-gpt-oss}" "$@"
