#!/bin/sh
# Start the prefill nodes of the cluster file.
exec "$(dirname "$0")/disagg" cluster up --role prefill "$@"
