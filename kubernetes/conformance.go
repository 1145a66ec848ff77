//go:build conformance

package main

// Imports the packages that tests/conformance builds from this module, so that
// go.mod and go.sum cover them. The tag is never set, so this file is never
// compiled.
import (
	_ "github.com/onsi/ginkgo/v2/ginkgo" // runs e2e.test in several processes
	_ "k8s.io/kubernetes/test/e2e"       // e2e.test

	// Programs of the tests' images.
	_ "go.etcd.io/etcd/server/v3"
	_ "k8s.io/kubernetes/test/images/agnhost"
	_ "k8s.io/kubernetes/test/images/nonewprivs"
	_ "k8s.io/kubernetes/test/images/resource-consumer"
	_ "k8s.io/kubernetes/test/images/resource-consumer/consume-cpu"
	_ "k8s.io/sample-apiserver"
)
