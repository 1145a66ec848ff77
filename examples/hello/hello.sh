#!/bin/bash
# The smallest workload: shows the cluster that it was given.
set -eu
echo "Hello from $K8S_CLUSTER_NAME at $K8S_CLUSTER_API"
kubectl get nodes
kubectl create configmap hello --from-literal=said=hello
kubectl get configmap hello --output 'jsonpath={.data.said}{"\n"}'
