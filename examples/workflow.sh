#!/bin/bash
# A workflow of two stages: the second Job starts when the first has succeeded, and gets its result.
# `coracle run` exits with the exit code of this script.
#
#   coracle run -N2 examples/workflow.sh
#   sbatch -N2 --wrap='coracle run examples/workflow.sh'
set -euo pipefail

# Creates a Job with the given name and shell command, waits for its end and prints its log. Returns 1 if the Job failed.
run_job() {
  local name=$1 command=$2
  kubectl create -f - >&2 <<MANIFEST
apiVersion: batch/v1
kind: Job
metadata:
  name: $name
spec:
  backoffLimit: 0
  template:
    spec:
      restartPolicy: Never
      containers:
      - name: main
        image: busybox:1.36
        command: [sh, -c, '$command']
MANIFEST
  # The first condition exists when the Job has succeeded or failed. "--for=condition=Complete" would not notice a failure.
  kubectl wait --for='jsonpath={.status.conditions[0].type}' --timeout=10m "job/$name" >&2
  kubectl logs "job/$name"
  if [[ $(kubectl get job "$name" -o 'jsonpath={.status.conditions[*].type}') == *Fail* ]]; then
    echo "job/$name failed" >&2
    return 1
  fi
}

numbers=$(run_job prepare 'echo 1 2 3 4')
echo "numbers: $numbers"
sum=$(run_job sum "echo \$((${numbers// / + }))")
echo "sum: $sum"
