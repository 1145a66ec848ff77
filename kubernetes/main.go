// Command kube is upstream's control plane in one static program.
//
// It acts as kube-apiserver, kube-controller-manager, kube-scheduler, etcd or
// kubectl, depending on its name: the build creates one symbolic link per
// component. The four servers share the pages of the program, which is a fifth of
// the size of five programs.
//
// Every component is upstream's own command, unmodified: each case of run
// repeats the main of upstream's cmd/<component>. Specific to Coracle are one
// environment variable (tightenGCAfterStart) and one of etcd's variables that has
// no flag (walSegmentSize).
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
	// "kube kube-apiserver --flag": the component expects its own name in
	// os.Args[0].
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

// run runs the named component. It returns false if the name is unknown.
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
		// Parse the verbosity first, as upstream does: creating the command
		// already logs (plugins, kuberc), before flags are parsed.
		_, _ = logs.GlogSetter(kubectl.GetLogVerbosity(os.Args))
		if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
			kubectlutil.CheckErr(err)
		}
	default:
		return false
	}
	return true
}

// walSegmentSize replaces etcd's 64 MB. etcd preallocates the current segment of
// its write-ahead log and the next one: 128 MB of memory, on a tmpfs, for a store
// of less than 1 MB. There is no flag for it.
const walSegmentSize = 8 << 20

// restGOGC is the environment variable with the garbage collection target of a
// server after its start, in percent as in GOGC ("100").
const restGOGC = "CORACLE_REST_GOGC"

// startPeriod is the time until the target changes.
const startPeriod = 8 * time.Second

// tightenGCAfterStart changes the garbage collection target after startPeriod,
// and returns memory to the system. A server allocates most of its heap in its
// first second, much of it before main, so GOGC is high at first, because repeated
// collections would slow down its start. But GOGC applies to the whole life of the
// process, and an idle control plane should use little memory.
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
