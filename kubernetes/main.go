// Command kube is upstream's control plane in one static program.
//
// It acts as kube-apiserver, kube-controller-manager, kube-scheduler, etcd or
// kubectl, by the name it is called with: the build makes one symbolic link per
// component. One program instead of five shares its pages between the four
// servers and is a fifth of the size.
//
// Every component is upstream's own command, unmodified: each case of run
// repeats the main of upstream's cmd/<component>. Of Coracle it knows one
// environment variable (tightenGCAfterStart), and it sets one of etcd's variables
// that has no flag (walSegmentSize).
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"time"
	_ "time/tzdata" // time zones of CronJobs, on nodes without zoneinfo

	"go.etcd.io/etcd/server/v3/etcdmain"
	"go.etcd.io/etcd/server/v3/storage/wal"
	_ "k8s.io/client-go/plugin/pkg/client/auth" // kubectl's credential plugins
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	_ "k8s.io/component-base/logs/json/register"          // --logging-format=json
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // client-go's metrics
	_ "k8s.io/component-base/metrics/prometheus/version"  // the build-info metric
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

// exitUsage is EX_USAGE of sysexits.h.
const exitUsage = 64

func main() {
	if run(filepath.Base(os.Args[0])) {
		return
	}
	// Called by another name: "kube kube-apiserver --flag". The component must
	// find its own name in os.Args[0], as if it had been called by it.
	if len(os.Args) > 1 {
		os.Args = os.Args[1:]
		if run(os.Args[0]) {
			return
		}
	}
	fmt.Fprintln(os.Stderr, "usage: kube COMPONENT [ARGUMENT...], or a link to kube named as the component:")
	fmt.Fprintln(os.Stderr, "kube-apiserver, kube-controller-manager, kube-scheduler, etcd, kubectl")
	os.Exit(exitUsage)
}

// run becomes the named component. It returns false if there is none of that
// name.
func run(component string) bool {
	switch component {
	case "kube-apiserver":
		tightenGCAfterStart()
		os.Exit(cli.Run(apiserver.NewAPIServerCommand()))
	case "kube-controller-manager":
		tightenGCAfterStart()
		os.Exit(cli.Run(controllermanager.NewControllerManagerCommand()))
	case "kube-scheduler":
		tightenGCAfterStart()
		os.Exit(cli.Run(scheduler.NewSchedulerCommand()))
	case "etcd":
		tightenGCAfterStart()
		wal.SegmentSizeBytes = walSegmentSize
		etcdmain.Main(os.Args)
	case "kubectl":
		// Verbosity is read by hand first, as upstream does: building the
		// command already logs (plugins, kuberc), before flags are parsed.
		_, _ = logs.GlogSetter(kubectl.GetLogVerbosity(os.Args))
		if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
			kubectlutil.CheckErr(err)
		}
	default:
		return false
	}
	return true
}

// walSegmentSize replaces etcd's 64 MB. etcd fills the segment it writes and the
// next one with zeros in advance, 128 MB for a store of less than one: memory if
// it is kept in a tmpfs, quota if not. There is no flag for it.
const walSegmentSize = 8 << 20

// restGOGC names the environment variable that holds the garbage collection
// target of a server that has started, in percent as in GOGC ("100").
const restGOGC = "CORACLE_REST_GOGC"

// startPeriod is how long a server counts as starting.
const startPeriod = 8 * time.Second

// tightenGCAfterStart goes over to another garbage collection target once a
// server has started, and returns the memory to the system. A server allocates
// most of its heap in its first second, much of it before main, so collecting
// it again and again costs start-up time: GOGC is high then. But GOGC holds for
// the life of the process, and a control plane at rest must stay small.
func tightenGCAfterStart() {
	percent, err := strconv.Atoi(os.Getenv(restGOGC))
	if err != nil || percent <= 0 {
		return
	}
	time.AfterFunc(startPeriod, func() {
		debug.SetGCPercent(percent)
		debug.FreeOSMemory()
	})
}
