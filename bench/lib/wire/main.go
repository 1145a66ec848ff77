// Wire carries bytes for bench/streams: it is both ends of what is measured, and the relay that it is measured against.
//
// The relay is upstream's way with nothing in it that could be left out: a request to the API server that asks for an upgrade, which
// the API server hands on to a port of a node as it does for exec and port-forward, and from then on only bytes, copied by io.Copy.
// Every hop has TLS, as kubelets have it.
//
//	serve ADDRESS                      an endpoint that sends or takes as many bytes as it is asked for
//	relay ADDRESS TARGET               the relay's end on the node: to the endpoint at TARGET, or to a command
//	forward ADDRESS PATH               the relay's end at the client: a connection to ADDRESS is one to PATH of the API server
//	fetch ADDRESS BYTES                takes so many bytes from an endpoint, and prints the seconds
//	push ADDRESS BYTES                 sends them
//	run PATH BYTES COMMAND...          joins standard input, of which there are so many bytes, and output with a command behind the relay
//	exec PATH ROUNDS COMMAND...        how long an exec takes, and how long COMMAND does here: prints milliseconds of each
//	hold PATH COUNT                    as many exec sessions at once, of which nothing is read, until standard input ends
//
// The API server is $K8S_CLUSTER_API, and $K8S_CLUSTER_API_TOKEN the way in.
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
		return measured(fetch(first, number))
	case "push":
		return measured(push(first, number))
	case "run":
		return remote(first, number, rest[1:])
	case "exec":
		return execs(first, int(number), rest[1:])
	case "hold":
		return hold(first, int(number))
	}
	return fmt.Errorf("%q is no command", command)
}

func measured(seconds float64, err error) error {
	if err == nil {
		fmt.Printf("%.3f\n", seconds)
	}
	return err
}
