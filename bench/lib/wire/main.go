// Wire transfers bytes for bench/streams: it has clients and servers for the measurements, and the relay that they are compared with.
//
// The relay is the minimum of upstream's streams: a request to the API server with an upgrade, which the API server proxies to a port of
// a node as it does for exec and port-forward, and then only bytes, copied by io.Copy. Every hop has TLS, like a kubelet's.
//
//	serve ADDRESS                      an endpoint that sends or receives the requested number of bytes
//	relay ADDRESS TARGET               the relay on the node: connects to the endpoint at TARGET, or runs a command
//	forward ADDRESS PATH               the relay at the client: forwards connections to ADDRESS to PATH of the API server
//	fetch ADDRESS BYTES                receives bytes from an endpoint, and prints the seconds
//	push ADDRESS BYTES                 sends bytes to an endpoint, and prints the seconds
//	run PATH BYTES COMMAND...          runs a command behind the relay, with this many bytes of standard input
//	exec PATH ROUNDS COMMAND...        prints the milliseconds of an exec, and of COMMAND on this host
//	hold PATH COUNT                    opens exec sessions, and reads nothing from them until standard input ends
//
// The API server is $K8S_CLUSTER_API; $K8S_CLUSTER_API_TOKEN authenticates to it.
package main

import (
	"fmt"
	"os"
	"strconv"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "wire:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) < 2 {
		return fmt.Errorf("usage: wire COMMAND ARGUMENTS, see main.go")
	}
	command, first, rest := args[0], args[1], args[2:]
	number, second := int64(0), ""
	if len(rest) > 0 {
		second = rest[0]
		number, _ = strconv.ParseInt(second, 10, 64)
	}
	switch command {
	case "serve":
		return serve(first)
	case "relay":
		return relay(first, second)
	case "forward":
		return forward(first, second)
	case "fetch":
		return printSeconds(fetch(first, number))
	case "push":
		return printSeconds(push(first, number))
	case "run":
		return runRemote(first, number, rest[1:])
	case "exec":
		return measureExecs(first, int(number), rest[1:])
	case "hold":
		return hold(first, int(number))
	}
	return fmt.Errorf("unknown command %q", command)
}

func printSeconds(seconds float64, err error) error {
	if err == nil {
		fmt.Printf("%.3f\n", seconds)
	}
	return err
}
