#!/bin/sh
# Follow the logs of all machines in tmux, a pane for each. Options go to `disagg cluster logs`, such as -c FILE, -n N,
# --request ID; --machine NAME, repeated, chooses machines. Without tmux: the logs of all machines, merged by time.
set -eu
disagg=$(cd "$(dirname "$0")" && pwd)/disagg
session=${DISAGG_TMUX_SESSION:-disagg-logs}

case " $* " in *" --help "* | *" -h "*) sed -n '2,3s/^# //p' "$0" && exit ;; esac
if ! command -v tmux >/dev/null; then
    echo "tmux is not installed: the logs of all machines follow, merged by time" >&2
    exec "$disagg" cluster logs -f "$@"
fi
config='' machines='' left=$#
while [ "$left" -gt 0 ]; do # each word goes from the front: into a variable, or to the end, for the panes
    word=$1 used=1
    case $word in
        -c | --config) config=${2-} used=2 ;;
        --config=*) config=${word#*=} ;;
        -m | --machine) machines="$machines ${2-}" used=2 ;;
        --machine=*) machines="$machines ${word#*=}" ;;
        -f | --follow) ;;
        *) set -- "$@" "$word" ;;
    esac
    [ "$used" -le "$left" ] || used=$left
    shift "$used"
    left=$((left - used))
done
if [ -z "$machines" ]; then # a node that is down is no reason to show no logs
    status=$("$disagg" cluster status --json ${config:+--config "$config"} || true)
    names='import json, sys; [print(each["name"]) for each in json.load(sys.stdin).get("machines", ())]'
    machines=$(printf '%s' "$status" | python3 -c "$names") || exit 1 # `disagg` has said why
fi
[ -n "$machines" ] || exit 1 # the same
[ -n "$config" ] && set -- "$@" --config "$config"

tmux kill-session -t "=$session" 2>/dev/null || true
for machine in $machines; do # names have no spaces
    if tmux has-session -t "=$session" 2>/dev/null; then
        tmux split-window -t "=$session:" "$disagg" cluster logs -f --machine "$machine" "$@"
    else
        tmux new-session -d -s "$session" -x 200 -y 50 "$disagg" cluster logs -f --machine "$machine" "$@"
        tmux set-option -t "$session" pane-border-status top >/dev/null
        tmux set-option -t "$session" remain-on-exit on >/dev/null
    fi
    tmux select-pane -t "=$session:" -T "$machine"
    tmux select-layout -t "=$session:" tiled >/dev/null
done
if [ -t 1 ]; then
    exec tmux attach-session -t "=$session"
fi
echo "the logs are in the tmux session $session: tmux attach -t $session"
