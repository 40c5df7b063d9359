#!/bin/sh
# Install or update everything on all machines of the cluster file, and start it.
exec "$(dirname "$0")/disagg" cluster deploy "$@"
