package main

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"time"
)

// commandHeader has the arguments of a command: for upgrades, the API server proxies headers but no query.
const commandHeader = "X-Command"

// relay replaces the kubelet: /tcp connects to target, /run runs a command.
func relay(address, target string) error {
	certificate, err := selfSigned()
	if err != nil {
		return err
	}
	routes := http.NewServeMux()
	routes.HandleFunc("/tcp", upgraded(func(client io.ReadWriteCloser, _ *http.Request) {
		server, err := net.Dial("tcp", target)
		if err != nil {
			client.Close()
			return
		}
		join(client, server)
	}))
	routes.HandleFunc("/run", upgraded(func(client io.ReadWriteCloser, request *http.Request) {
		defer client.Close()
		serveCommand(client, request.Header[commandHeader])
	}))
	server := &http.Server{Addr: address, Handler: routes, TLSConfig: &tls.Config{
		Certificates: []tls.Certificate{certificate},
		// HTTP/2 has no upgrades.
		NextProtos: []string{"http/1.1"},
	}}
	return server.ListenAndServeTLS("", "")
}

// serveCommand runs a command. Its input is prefixed with its length; the response is its output.
func serveCommand(client io.ReadWriteCloser, command []string) {
	var length [8]byte
	if _, err := io.ReadFull(client, length[:]); err != nil || len(command) == 0 {
		return
	}
	process := exec.Command(command[0], command[1:]...)
	process.Stdin = io.LimitReader(client, int64(binary.BigEndian.Uint64(length[:])))
	process.Stdout = client
	process.Stderr = os.Stderr
	process.Run()
}

// forward opens a connection to the relay for each accepted connection.
func forward(address, path string) error {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	for {
		client, err := listener.Accept()
		if err != nil {
			return err
		}
		go func() {
			server, err := upgrade(path, nil)
			if err != nil {
				fmt.Fprintln(os.Stderr, "wire:", err)
				client.Close()
				return
			}
			join(client, server)
		}()
	}
}

// runRemote runs a command behind the relay, with this many bytes of standard input.
func runRemote(path string, bytes int64, command []string) error {
	server, err := upgrade(path, http.Header{commandHeader: command})
	if err != nil {
		return err
	}
	defer server.Close()
	length := binary.BigEndian.AppendUint64(nil, uint64(bytes))
	if _, err := server.Write(length); err != nil {
		return err
	}
	if _, err := io.CopyN(server, os.Stdin, bytes); err != nil {
		return err
	}
	_, err = io.Copy(os.Stdout, server)
	return err
}

// join copies in both directions until one of them ends.
func join(a, b io.ReadWriteCloser) {
	done := make(chan struct{}, 2)
	for _, pair := range [][2]io.ReadWriteCloser{{a, b}, {b, a}} {
		go func() {
			io.Copy(pair[1], pair[0])
			done <- struct{}{}
		}()
	}
	<-done
	a.Close()
	b.Close()
}

// connection is a connection after an upgrade. Bytes that the HTTP reader has buffered are read first.
type connection struct {
	net.Conn
	buffered *bufio.Reader
}

func (c connection) Read(bytes []byte) (int, error) {
	if c.buffered.Buffered() > 0 {
		return c.buffered.Read(bytes)
	}
	return c.Conn.Read(bytes)
}

// upgraded upgrades every request.
func upgraded(handle func(io.ReadWriteCloser, *http.Request)) http.HandlerFunc {
	return func(response http.ResponseWriter, request *http.Request) {
		conn, buffered, err := response.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n")
		handle(connection{conn, buffered.Reader}, request)
	}
}

// upgrade opens a connection to the API server and upgrades it, like exec and port-forward.
func upgrade(path string, headers http.Header) (io.ReadWriteCloser, error) {
	request, err := http.NewRequest("GET", os.Getenv("K8S_CLUSTER_API")+path, nil)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Connection", "Upgrade")
	request.Header.Set("Upgrade", "tcp")
	request.Header.Set("Authorization", "Bearer "+os.Getenv("K8S_CLUSTER_API_TOKEN"))
	for name, values := range headers {
		request.Header[name] = values
	}
	// Skip verification: the API server is on the same machine, and no data is secret.
	config := &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"http/1.1"}}
	conn, err := tls.Dial("tcp", request.URL.Host, config)
	if err != nil {
		return nil, err
	}
	if err := request.Write(conn); err != nil {
		conn.Close()
		return nil, err
	}
	reader := bufio.NewReaderSize(conn, 4096)
	response, err := http.ReadResponse(reader, request)
	if err != nil {
		conn.Close()
		return nil, err
	}
	if response.StatusCode != http.StatusSwitchingProtocols {
		text, _ := io.ReadAll(response.Body)
		conn.Close()
		return nil, fmt.Errorf("%s: %s: %s", path, response.Status, text)
	}
	return connection{conn, reader}, nil
}

func selfSigned() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(24 * time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, err
}
