package main

import (
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"time"
)

// The first byte of a server's WebSocket frames, and the channel with the exit status.
const (
	binaryMessage = 0x82
	errorChannel  = 3
)

// measureExecs alternates exec requests and a command on this host.
func measureExecs(path string, rounds int, command []string) error {
	for range rounds {
		start := time.Now()
		if err := execute(path); err != nil {
			return err
		}
		fmt.Printf("exec-ms %.2f\n", time.Since(start).Seconds()*1000)
		start = time.Now()
		if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%v: %w: %s", command, err, out)
		}
		fmt.Printf("nsenter-ms %.2f\n", time.Since(start).Seconds()*1000)
	}
	return nil
}

// execute runs a command in a container and waits until it has succeeded.
func execute(path string) error {
	session, err := open(path)
	if err != nil {
		return err
	}
	defer session.Close()
	for {
		message, err := next(session)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if len(message) > 0 && message[0] == errorChannel {
			if status := string(message[1:]); !strings.Contains(status, `"status":"Success"`) {
				return fmt.Errorf("%s: %s", path, status)
			}
			return nil
		}
	}
}

// hold opens sessions and keeps them open.
func hold(path string, count int) error {
	for range count {
		session, err := open(path)
		if err != nil {
			return err
		}
		defer session.Close()
		// The first message confirms the session.
		if _, err := next(session); err != nil {
			return err
		}
	}
	fmt.Println("held", count)
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

// open opens a session like kubectl: a WebSocket with channels.
func open(path string) (io.ReadWriteCloser, error) {
	return upgrade(path, http.Header{
		"Upgrade":                {"websocket"},
		"Sec-Websocket-Version":  {"13"},
		"Sec-Websocket-Key":      {"bWVhc3VyaW5nIGV4ZWNzIQ=="},
		"Sec-Websocket-Protocol": {"v5.channel.k8s.io"},
	})
}

// next returns the next message of a server. The kubelet never fragments messages.
func next(from io.Reader) ([]byte, error) {
	var head [8]byte
	if _, err := io.ReadFull(from, head[:2]); err != nil {
		return nil, err
	}
	if head[0] != binaryMessage {
		return nil, fmt.Errorf("unexpected frame type %#x", head[0])
	}
	length := uint64(head[1])
	switch length {
	case 126:
		if _, err := io.ReadFull(from, head[:2]); err != nil {
			return nil, err
		}
		length = uint64(binary.BigEndian.Uint16(head[:2]))
	case 127:
		if _, err := io.ReadFull(from, head[:8]); err != nil {
			return nil, err
		}
		length = binary.BigEndian.Uint64(head[:8])
	}
	if length > 1<<20 {
		return nil, fmt.Errorf("message too long: %d bytes", length)
	}
	message := make([]byte, length)
	_, err := io.ReadFull(from, message)
	return message, err
}
