. /tmp/brk/env.sh; cd /tmp/fresh2; M=/tmp/brk/m/gqa
t() { echo "=== ${*: -6}"; timeout 40 "$@" 2>&1 | tail -n 8 | cut -c1-500; echo "rc=${PIPESTATUS[0]}"; }
J="$PY -m jpaged.cli"
t $J generate hi --model $M --seed 99999999999999999999999
t $J generate hi --model $M --stop ""
t $J generate hi --model $M --max-model-len 1
t $J generate hi --model $M --max-tokens 5 --max-num-batched-tokens 1 --max-num-seqs 1 --raw
t $J generate "$(head -c 3000 /dev/zero | tr '\0' a)" --model $M
echo "=== numblocks"; (ulimit -v 30000000; time t $J generate hi --max-tokens 4 --model $M --num-blocks 1000000000)
