package main

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"time"
)

// A request has nine bytes: an operation, and a number of bytes.
const (
	send    = 's'
	receive = 't'
)

// blockSize is the size of reads and writes.
const blockSize = 256 << 10

// serve handles requests, one per connection.
func serve(address string) error {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	for {
		connection, err := listener.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer connection.Close()
			handle(connection)
		}()
	}
}

func handle(connection net.Conn) {
	var request [9]byte
	if _, err := io.ReadFull(connection, request[:]); err != nil {
		return
	}
	bytes := int64(binary.BigEndian.Uint64(request[1:]))
	switch request[0] {
	case send:
		write(connection, bytes)
		// Wait until the client closes, so that no data is lost.
		io.Copy(io.Discard, connection)
	case receive:
		if read(connection, bytes) == nil {
			connection.Write([]byte{receive})
		}
	}
}

// fetch returns the seconds until all bytes are received.
func fetch(address string, bytes int64) (float64, error) {
	return measure(address, send, bytes, func(connection net.Conn) error { return read(connection, bytes) })
}

// push returns the seconds until the endpoint has received all bytes.
func push(address string, bytes int64) (float64, error) {
	return measure(address, receive, bytes, func(connection net.Conn) error {
		if err := write(connection, bytes); err != nil {
			return err
		}
		return read(connection, 1)
	})
}

func measure(address string, operation byte, bytes int64, transfer func(net.Conn) error) (float64, error) {
	start := time.Now()
	connection, err := net.Dial("tcp", address)
	if err != nil {
		return 0, err
	}
	defer connection.Close()
	request := binary.BigEndian.AppendUint64([]byte{operation}, uint64(bytes))
	if _, err := connection.Write(request); err != nil {
		return 0, err
	}
	if err := transfer(connection); err != nil {
		return 0, fmt.Errorf("%s: %w", address, err)
	}
	return time.Since(start).Seconds(), nil
}

func write(to io.Writer, bytes int64) error {
	buffer := make([]byte, blockSize)
	for bytes > 0 {
		part := min(bytes, blockSize)
		if _, err := to.Write(buffer[:part]); err != nil {
			return err
		}
		bytes -= part
	}
	return nil
}

func read(from io.Reader, bytes int64) error {
	buffer := make([]byte, blockSize)
	for bytes > 0 {
		got, err := from.Read(buffer[:min(bytes, blockSize)])
		bytes -= int64(got)
		if err != nil && bytes > 0 {
			return err
		}
	}
	return nil
}
