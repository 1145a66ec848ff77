package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
)

// Tree has the files of a layer, by path without a leading slash.
type Tree map[string]*node

type node struct {
	kind byte // of archive/tar
	mode int64
	link string
	data []byte
}

// Dir adds a directory and its parents.
func (t Tree) Dir(name string, mode int64) {
	t.parents(name)
	t[name] = &node{kind: tar.TypeDir, mode: mode}
}

// Text adds a file.
func (t Tree) Text(name, text string, mode int64) {
	t.bytes(name, []byte(text), mode)
}

// Copy adds a file of this machine.
func (t Tree) Copy(name, from string, mode int64) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	t.bytes(name, data, mode)
	return nil
}

// Link adds a symbolic link.
func (t Tree) Link(name, to string) {
	t.parents(name)
	t[name] = &node{kind: tar.TypeSymlink, mode: 0o777, link: to}
}

func (t Tree) bytes(name string, data []byte, mode int64) {
	t.parents(name)
	t[name] = &node{kind: tar.TypeReg, mode: mode, data: data}
}

func (t Tree) parents(name string) {
	for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
		if t[dir] == nil {
			t[dir] = &node{kind: tar.TypeDir, mode: 0o755}
		}
	}
}

// unused lists directories that no test reads.
var unused = []string{
	"usr/share/bash-completion/", "usr/share/doc/", "usr/share/info/", "usr/share/lintian/", "usr/share/locale/", "usr/share/man/",
	"usr/share/menu/", "usr/share/perl5/", "usr/share/common-licenses/", "usr/share/initramfs-tools/", "usr/share/debconf/", "usr/share/pixmaps/",
	"usr/lib/x86_64-linux-gnu/gconv/", "usr/lib/aarch64-linux-gnu/gconv/", "usr/lib/systemd/", "usr/share/bug/",
}

// Package adds the files of a Debian package. All of them are below usr, with
// the links in / that Debian itself creates at installation.
func (t Tree) Package(file string) error {
	unpack := exec.Command("dpkg-deb", "--fsys-tarfile", file)
	unpack.Stderr = os.Stderr
	out, err := unpack.Output()
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	for _, dir := range []string{"bin", "sbin", "lib", "lib64"} {
		t.Link(dir, "usr/"+dir)
	}
	reader := tar.NewReader(bytes.NewReader(out))
	for {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		name := inUsr(path.Clean(header.Name))
		isUnused := func(dir string) bool { return strings.HasPrefix(name+"/", dir) }
		if name == "." || slices.ContainsFunc(unused, isUnused) {
			continue
		}
		switch header.Typeflag {
		case tar.TypeDir:
			if t[name] == nil {
				t.Dir(name, header.Mode)
			}
		case tar.TypeReg:
			data, err := io.ReadAll(reader)
			if err != nil {
				return fmt.Errorf("%s: %s: %w", file, name, err)
			}
			t.bytes(name, data, header.Mode)
		case tar.TypeSymlink:
			t.Link(name, header.Linkname)
		case tar.TypeLink:
			linked := t[inUsr(path.Clean(header.Linkname))]
			if linked == nil {
				return fmt.Errorf("%s: %s is a link to %s, which does not exist", file, name, header.Linkname)
			}
			t.parents(name)
			t[name] = linked
		default:
			return fmt.Errorf("%s: %s is of type %q", file, name, header.Typeflag)
		}
	}
}

func inUsr(name string) string {
	first, _, _ := strings.Cut(name, "/")
	if slices.Contains([]string{"bin", "sbin", "lib", "lib64"}, first) {
		return "usr/" + name
	}
	return name
}

// Tar returns the layer as an uncompressed tar file: sorted, owned by root,
// without times.
func (t Tree) Tar() ([]byte, error) {
	var buffer bytes.Buffer
	writer := tar.NewWriter(&buffer)
	for _, name := range slices.Sorted(maps.Keys(t)) {
		node := t[name]
		header := &tar.Header{
			Name: name, Typeflag: node.kind, Mode: node.mode, Linkname: node.link, Size: int64(len(node.data)),
			Uname: "root", Gname: "root",
		}
		if node.kind == tar.TypeDir {
			header.Name += "/"
		}
		if err := writer.WriteHeader(header); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		if _, err := writer.Write(node.data); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	err := writer.Close()
	return buffer.Bytes(), err
}
