#!/bin/bash
# Takes the place of KSI's run-workload.sh, so that its users keep their command lines:
#
#   srun -N3 /bin/bash run-workload.sh WORKLOAD-SCRIPT [SHARED-DIRECTORY]
#
# Pods find the shared directory (its subdirectory `app`, if there is one) as the hostPath /app; without it, the current directory. The
# workload gets it as its first argument.
set -euo pipefail

if (($# < 1)); then
  echo "usage: $0 <workload-script> [<shared-directory>]" >&2
  exit 64
fi
workload=$1
if (($# < 2)); then
  exec coracle run /bin/bash "$workload"
fi
shared=$(realpath -- "$2")
app=$shared
if [[ -d $shared/app ]]; then app=$shared/app; fi
exec coracle run --node-path "/app=$app" /bin/bash "$workload" "$shared"
