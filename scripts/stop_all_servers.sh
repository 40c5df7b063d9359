#!/bin/sh
# Stop the gateway and all nodes of the cluster file. Running requests are finished first.
exec "$(dirname "$0")/disagg" cluster down "$@"
