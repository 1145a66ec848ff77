package main

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"time"
)

// A question is nine bytes: what to do, and with how many bytes.
const (
	send = 's'
	take = 't'
)

// block is how much an endpoint reads and writes at once.
const block = 256 << 10

// serve answers questions, one a connection.
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
			answer(connection)
		}()
	}
}

func answer(connection net.Conn) {
	var question [9]byte
	if _, err := io.ReadFull(connection, question[:]); err != nil {
		return
	}
	bytes := int64(binary.BigEndian.Uint64(question[1:]))
	switch question[0] {
	case send:
		write(connection, bytes)
		// The client leaves first: what is on its way is not cut off.
		io.Copy(io.Discard, connection)
	case take:
		if read(connection, bytes) == nil {
			connection.Write([]byte{take})
		}
	}
}

// fetch says how many seconds it took until the bytes were here.
func fetch(address string, bytes int64) (float64, error) {
	return ask(address, send, bytes, func(connection net.Conn) error { return read(connection, bytes) })
}

// push says how many seconds it took until the other end had the bytes.
func push(address string, bytes int64) (float64, error) {
	return ask(address, take, bytes, func(connection net.Conn) error {
		if err := write(connection, bytes); err != nil {
			return err
		}
		return read(connection, 1)
	})
}

func ask(address string, what byte, bytes int64, then func(net.Conn) error) (float64, error) {
	began := time.Now()
	connection, err := net.Dial("tcp", address)
	if err != nil {
		return 0, err
	}
	defer connection.Close()
	question := binary.BigEndian.AppendUint64([]byte{what}, uint64(bytes))
	if _, err := connection.Write(question); err != nil {
		return 0, err
	}
	if err := then(connection); err != nil {
		return 0, fmt.Errorf("%s: %w", address, err)
	}
	return time.Since(began).Seconds(), nil
}

func write(to io.Writer, bytes int64) error {
	buffer := make([]byte, block)
	for bytes > 0 {
		part := min(bytes, block)
		if _, err := to.Write(buffer[:part]); err != nil {
			return err
		}
		bytes -= part
	}
	return nil
}

func read(from io.Reader, bytes int64) error {
	buffer := make([]byte, block)
	for bytes > 0 {
		got, err := from.Read(buffer[:min(bytes, block)])
		bytes -= int64(got)
		if err != nil && bytes > 0 {
			return err
		}
	}
	return nil
}
