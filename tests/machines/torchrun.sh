#!/bin/bash
# torchrun on one of the machines of two_nodes.sh: torchrun.sh ARGUMENT...
# The machines have one name and one address each, so the name says not who hosts the rendezvous.
if [ "$NODE" = 0 ]; then host=true; else host=false; fi
exec "$PYTHON" -m torch.distributed.run --nnodes=2 --nproc-per-node=1 --max-restarts="${RESTARTS:-2}" \
  --rdzv-backend=c10d --rdzv-id=test --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" \
  --rdzv-conf="is_host=$host" --local-addr="$ADDRESS" "$@"
