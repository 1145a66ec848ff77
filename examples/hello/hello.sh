#!/bin/bash
# A minimal workload: prints the cluster's name, API and nodes.
set -eu
echo "Hello from $K8S_CLUSTER_NAME at $K8S_CLUSTER_API"
kubectl get nodes
kubectl create configmap hello --from-literal=greeting=hello
kubectl get configmap hello --output 'jsonpath={.data.greeting}{"\n"}'
