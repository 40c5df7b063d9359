#!/usr/bin/env bash
# Follow the logs of all machines in tmux, a pane for each. Options go to `disagg cluster logs`, such as -c FILE, -n N,
# --request ID; --machine NAME, repeated, chooses machines. Without tmux: the logs of all machines, merged by time.
set -euo pipefail
disagg=$(cd "$(dirname "$0")" && pwd)/disagg
session=${DISAGG_TMUX_SESSION:-disagg-logs}

case " $* " in *" --help "* | *" -h "*) sed -n '2,3s/^# //p' "$0" && exit ;; esac
if ! command -v tmux >/dev/null; then
    echo "tmux is not installed: the logs of all machines follow, merged by time" >&2
    exec "$disagg" cluster logs -f "$@"
fi
where=() machines=() options=() # of the cluster file; of the panes; of the logs
while (($#)); do
    case $1 in
        -c | --config) where=("$1" "${2-}") && shift ;;
        --config=*) where=("$1") ;;
        -m | --machine) machines+=("${2-}") && shift ;;
        --machine=*) machines+=("${1#*=}") ;;
        -f | --follow) ;;
        *) options+=("$1") ;;
    esac
    shift
done
if ((${#machines[@]} == 0)); then
    status=$("$disagg" cluster status --json "${where[@]}" || true) # a node that is down is no reason to show no logs
    names='import json, sys; [print(each["name"]) for each in json.load(sys.stdin).get("machines", ())]'
    mapfile -t machines < <(python3 -c "$names" <<<"$status")
fi
((${#machines[@]})) || exit 1 # `disagg` has said why

tmux kill-session -t "=$session" 2>/dev/null || true
for machine in "${machines[@]}"; do
    follow=$(printf '%q ' "$disagg" cluster logs -f --machine "$machine" "${where[@]}" "${options[@]}")
    if tmux has-session -t "=$session" 2>/dev/null; then
        tmux split-window -t "=$session:" "$follow"
    else
        tmux new-session -d -s "$session" -x 200 -y 50 "$follow"
        tmux set-option -t "$session" pane-border-status top >/dev/null
        tmux set-option -t "$session" remain-on-exit on >/dev/null
    fi
    tmux select-pane -t "=$session:" -T "$machine"
    tmux select-layout -t "=$session:" tiled >/dev/null
done
if [[ -t 1 ]]; then
    exec tmux attach-session -t "=$session"
fi
echo "the logs are in the tmux session $session: tmux attach -t $session"
