#!/bin/bash
# experiments/launch/openmpi.sh node1:12345 -np 4 --host node1:2,node2:2 -- experiments/generated.py ...
# Any version of Open MPI: rank and size come from its environment, the address of rank 0 from you.
coordinator=$1
shift
launcher=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  launcher+=("$1")
  shift
done
shift
exec mpirun "${launcher[@]}" bash -c 'exec moe train "$@" --coordinator "$0" \
  --num-processes "$OMPI_COMM_WORLD_SIZE" --process-id "$OMPI_COMM_WORLD_RANK"' "$coordinator" "$@"
