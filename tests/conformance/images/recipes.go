package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

const (
	searchPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

	users = `root:x:0:0:root:/root:/bin/sh
daemon:x:1:1:daemon:/usr/sbin:/bin/false
bin:x:2:2:bin:/bin:/bin/false
sys:x:3:3:sys:/dev:/bin/false
mail:x:8:8:mail:/var/spool/mail:/bin/false
www-data:x:33:33:www-data:/var/www:/bin/false
nobody:x:65534:65534:nobody:/home:/bin/false
`
	groups = `root:x:0:
daemon:x:1:
bin:x:2:
sys:x:3:
tty:x:5:
mail:x:8:
www-data:x:33:
nogroup:x:65534:
`
	nginxConf = `user www-data;
error_log /dev/stderr notice;
pid /run/nginx.pid;
events {}
http {
    include /etc/nginx/mime.types;
    access_log /dev/stdout;
    server {
        listen 80;
        root /usr/share/nginx/html;
        location / { index index.html; }
    }
}
`
)

// Recipes returns the images by the last component of their name. Each follows
// upstream's Dockerfile in test/images or build/pause, with busybox or Debian's
// packages instead of another distribution.
func Recipes(from Sources) (map[string]Image, error) {
	b := builder{from: from}
	busybox := b.busybox()
	tools := b.tools()
	program := func(name, path string, mode int64) *Layer {
		tree := Tree{}
		b.try(tree.Copy(path, filepath.Join(from.Programs, name), mode))
		return &Layer{Tree: tree}
	}
	onBusybox := func(config Config, layers ...*Layer) Image {
		config.Env = []string{searchPath}
		return Image{Layers: append([]*Layer{busybox}, layers...), Config: config}
	}

	pause := Image{
		Layers: []*Layer{program("pause", "pause", 0o755)},
		Config: Config{User: "65535:65535", Env: []string{searchPath}, Entrypoint: []string{"/pause"}, WorkingDir: "/"},
	}
	agnhost := b.agnhost(tools, pause)
	pet := func(name string) Image {
		tree := Tree{}
		for _, file := range []string{name + ".jpg", "data.json"} {
			b.try(tree.Copy(file, filepath.Join(from.Upstream, name, "html", file), 0o644))
		}
		// A test mounts this image, and looks for the distribution of upstream's image.
		tree.Text("etc/os-release", "NAME=\"Debian GNU/Linux\"\nPRETTY_NAME=\"Debian GNU/Linux in place of Alpine Linux\"\nID=debian\n", 0o644)
		config := agnhost.Config
		config.Cmd = []string{"test-webserver"}
		return Image{Layers: append(agnhost.Layers[:len(agnhost.Layers):len(agnhost.Layers)], &Layer{Tree: tree}), Config: config}
	}
	shell := Config{Env: []string{searchPath}, Cmd: []string{"sh"}}

	recipes := map[string]Image{
		"agnhost":           agnhost,
		"busybox":           onBusybox(Config{Cmd: []string{"sh"}}),
		"pause":             pause,
		"nginx":             b.nginx(),
		"kitten":            pet("kitten"),
		"nautilus":          pet("nautilus"),
		"ipc-utils":         {Layers: []*Layer{tools}, Config: shell},
		"glibc-dns-testing": {Layers: []*Layer{tools}, Config: shell},
		"nonroot":           onBusybox(Config{User: "1234", Cmd: []string{"sh"}}),
		// Its test needs the set-user-ID and set-group-ID bits.
		"nonewprivs": onBusybox(Config{Cmd: []string{"nnp"}}, program("nonewprivs", "usr/local/bin/nnp", 0o6755)),
		"sample-apiserver": onBusybox(Config{Entrypoint: []string{"/sample-apiserver"}},
			program("sample-apiserver", "sample-apiserver", 0o755)),
		"etcd":     onBusybox(Config{Entrypoint: []string{"etcd"}}, program("etcd", "usr/local/bin/etcd", 0o755)),
		"sysbench": {Layers: []*Layer{b.sysbench()}, Config: shell},
		"resource-consumer": {
			Layers: []*Layer{tools, program("resource-consumer", "consumer", 0o755), program("consume-cpu", "consume-cpu", 0o755)},
			Config: Config{Env: []string{searchPath}, Entrypoint: []string{"/consumer"}, ExposedPorts: ports(8080)},
		},
	}
	return recipes, b.failed
}

var errNoShell = errors.New("Debian's package has no /usr/bin/bash-static")
var errNoBusybox = errors.New("Debian's package has no /bin/busybox")

// builder builds trees and keeps the first error, so that recipes need no error
// handling.
type builder struct {
	from   Sources
	failed error
}

func (b *builder) try(err error) {
	if b.failed == nil {
		b.failed = err
	}
}

// busybox returns Debian's busybox, instead of the image of that name and of
// Alpine.
func (b *builder) busybox() *Layer {
	tree := skeleton(users, groups)
	debian := b.debian("busybox")
	busybox, ok := debian["usr/bin/busybox"]
	if !ok {
		b.try(errNoBusybox)
		return &Layer{Tree: tree}
	}
	tree["bin/busybox"] = busybox
	for _, applet := range b.applets(busybox) {
		tree.Link("bin/"+applet, "busybox")
	}
	tree.Link("usr/bin/env", "../../bin/busybox")
	// The shell of Debian's busybox, unlike upstream's newer one, does not pass on variables with names such as data-1.
	// Bash does, so `sh` is bash. `/bin/sh` is busybox, because a test compares its error message.
	if shell, ok := debian["usr/bin/bash-static"]; ok {
		tree["bin/bash"] = shell
		tree.Link("usr/local/bin/sh", "/bin/bash")
	} else {
		b.try(errNoShell)
	}
	return &Layer{Tree: tree}
}

// tools returns a Debian with the tools that upstream adds to agnhost, and
// busybox for the rest.
func (b *builder) tools() *Layer {
	tree := skeleton(
		users+"user-defined-in-image:x:1000:1000::/home/user-defined-in-image:/bin/sh\n",
		groups+"user-defined-in-image:x:1000:\ngroup-defined-in-image:x:50000:user-defined-in-image\n",
	)
	maps.Copy(tree, b.debian("tools"))
	b.addBusybox(tree)
	// Debian creates these links at installation.
	tree.Link("usr/bin/nc", "nc.openbsd")
	tree.Link("usr/local/bin/iperf", "/usr/bin/iperf")
	return &Layer{Tree: tree}
}

func (b *builder) agnhost(tools *Layer, pause Image) Image {
	tree := Tree{}
	b.try(tree.Copy("agnhost", filepath.Join(b.from.Programs, "agnhost"), 0o755))
	tree.Link("agnhost-2", "agnhost")
	tree.Dir("uploads", 0o755)
	for _, file := range []string{"localhost.crt", "localhost.key"} {
		b.try(tree.Copy(file, filepath.Join(b.from.Upstream, "agnhost/porter", file), 0o644))
	}
	b.try(tree.fakeRegistry("var/registry", "pause", "testing", pause))
	return Image{
		Layers: []*Layer{tools, {Tree: tree}},
		Config: Config{
			Env: []string{searchPath}, Entrypoint: []string{"/agnhost"}, Cmd: []string{"pause"},
			ExposedPorts: ports(80, 8080, 8081, 9376, 5000),
		},
	}
}

func (b *builder) nginx() Image {
	tree := skeleton(users, groups)
	maps.Copy(tree, b.debian("nginx"))
	for _, dir := range []string{"var/lib/nginx", "var/log/nginx", "run"} {
		tree.Dir(dir, 0o755)
	}
	tree.Text("etc/nginx/nginx.conf", nginxConf, 0o644)
	tree.Text("usr/share/nginx/html/index.html", "<h1>Welcome to nginx!</h1>\n", 0o644)
	b.addBusybox(tree)
	return Image{Layers: []*Layer{{Tree: tree}}, Config: Config{
		Env: []string{searchPath}, Cmd: []string{"nginx", "-g", "daemon off;"}, ExposedPorts: ports(80), StopSignal: "SIGQUIT",
	}}
}

// sysbench returns an image for the examples of KSI. Upstream has none.
func (b *builder) sysbench() *Layer {
	tree := skeleton(users, groups)
	maps.Copy(tree, b.debian("sysbench"))
	b.addBusybox(tree)
	return &Layer{Tree: tree}
}

// addBusybox adds busybox's applets to a Debian that lacks these commands.
func (b *builder) addBusybox(tree Tree) {
	busybox, ok := b.debian("busybox")["usr/bin/busybox"]
	if !ok {
		b.try(errNoBusybox)
		return
	}
	tree["usr/bin/busybox"] = busybox
	for _, applet := range b.applets(busybox) {
		if tree["usr/bin/"+applet] == nil && tree["usr/sbin/"+applet] == nil {
			tree.Link("usr/bin/"+applet, "busybox")
		}
	}
}

// debian returns the files of all packages of a base.
func (b *builder) debian(base string) Tree {
	tree := Tree{}
	names, err := readLines(filepath.Join(b.from.Packages, base+".packages"))
	b.try(err)
	for _, name := range names {
		b.try(tree.Package(filepath.Join(b.from.Debs, name)))
	}
	return tree
}

// applets returns the names of busybox's applets.
func (b *builder) applets(busybox *node) []string {
	file, err := os.CreateTemp("", "busybox")
	if err != nil {
		b.try(err)
		return nil
	}
	defer os.Remove(file.Name())
	_, err = file.Write(busybox.data)
	b.try(err)
	b.try(file.Chmod(0o700))
	b.try(file.Close())
	list, err := exec.Command(file.Name(), "--list").Output()
	b.try(err)
	return strings.Fields(strings.Replace(string(list), "busybox\n", "", 1))
}

// skeleton returns the directories and files of every image with a shell.
func skeleton(users, groups string) Tree {
	tree := Tree{}
	for _, dir := range []string{"dev", "proc", "sys", "run", "home", "mnt", "var", "usr/local/bin"} {
		tree.Dir(dir, 0o755)
	}
	tree.Dir("root", 0o700)
	tree.Dir("tmp", 0o1777)
	tree.Dir("var/tmp", 0o1777)
	tree.Text("etc/passwd", users, 0o644)
	tree.Text("etc/group", groups, 0o644)
	tree.Text("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n", 0o644)
	return tree
}

func ports(numbers ...int) map[string]struct{} {
	set := map[string]struct{}{}
	for _, number := range numbers {
		set[fmt.Sprintf("%d/tcp", number)] = struct{}{}
	}
	return set
}
