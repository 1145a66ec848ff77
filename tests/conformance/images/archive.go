package main

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path"
	"runtime"
	"slices"
	"strings"
)

// Image is an image to build: its layers from the bottom up, and its
// configuration.
type Image struct {
	Layers []*Layer
	Config Config
}

// Config is the config object of an OCI image configuration.
type Config struct {
	User         string              `json:"User,omitempty"`
	ExposedPorts map[string]struct{} `json:"ExposedPorts,omitempty"`
	Env          []string            `json:"Env,omitempty"`
	Entrypoint   []string            `json:"Entrypoint,omitempty"`
	Cmd          []string            `json:"Cmd,omitempty"`
	WorkingDir   string              `json:"WorkingDir,omitempty"`
	StopSignal   string              `json:"StopSignal,omitempty"`
	Labels       map[string]string   `json:"Labels,omitempty"`
}

// Layer is a layer, which several images may share.
type Layer struct {
	Tree   Tree
	packed *packedLayer
}

type packedLayer struct {
	diffID string
	gzip   []byte
}

// Descriptor is an OCI content descriptor.
type Descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Platform    *Platform         `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// Platform is the platform of an image.
type Platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

const (
	mediaIndex    = "application/vnd.oci.image.index.v1+json"
	mediaManifest = "application/vnd.oci.image.manifest.v1+json"
	mediaConfig   = "application/vnd.oci.image.config.v1+json"
	mediaLayer    = "application/vnd.oci.image.layer.v1.tar+gzip"

	// Builds are reproducible.
	created = "1970-01-01T00:00:00Z"
)

// Manifest is an OCI image manifest.
type Manifest struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Config        Descriptor   `json:"config"`
	Layers        []Descriptor `json:"layers"`
}

// Index is an OCI image index.
type Index struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Manifests     []Descriptor `json:"manifests"`
}

// dockerEntry is an image in manifest.json, which `docker load` reads.
type dockerEntry struct {
	Config   string
	RepoTags []string
	Layers   []string
}

// Archive is an OCI image layout, to be written as a tar file.
type Archive struct {
	blobs  map[string][]byte
	index  Index
	docker []dockerEntry
}

// NewArchive returns an empty archive.
func NewArchive() *Archive {
	return &Archive{blobs: map[string][]byte{}, index: Index{SchemaVersion: 2, MediaType: mediaIndex}}
}

// Add adds an image under a reference.
func (a *Archive) Add(reference string, image Image) error {
	_, tag, _ := strings.Cut(path.Base(reference), ":")
	// Tests update pods from one version of an image to another, so the
	// versions must have different digests.
	image.Config.Labels = map[string]string{"org.opencontainers.image.version": tag}
	manifest, packed, err := image.pack(a.put)
	if err != nil {
		return err
	}
	descriptor := a.put(mediaManifest, packed)
	descriptor.Platform = &Platform{runtime.GOARCH, "linux"}
	descriptor.Annotations = map[string]string{
		"io.containerd.image.name":          reference,
		"org.opencontainers.image.ref.name": tag,
	}
	a.index.Manifests = append(a.index.Manifests, descriptor)

	entry := dockerEntry{Config: blobPath(manifest.Config.Digest), RepoTags: []string{reference}}
	for _, layer := range manifest.Layers {
		entry.Layers = append(entry.Layers, blobPath(layer.Digest))
	}
	a.docker = append(a.docker, entry)
	return nil
}

// WriteFile writes the archive.
func (a *Archive) WriteFile(file string) error {
	files := Tree{}
	files.Text("oci-layout", `{"imageLayoutVersion":"1.0.0"}`, 0o644)
	files.bytes("index.json", encode(a.index), 0o644)
	files.bytes("manifest.json", encode(a.docker), 0o644)
	for _, digest := range slices.Sorted(maps.Keys(a.blobs)) {
		files.bytes(blobPath(digest), a.blobs[digest], 0o644)
	}
	out, err := files.Tar()
	if err != nil {
		return err
	}
	return os.WriteFile(file, out, 0o644)
}

func (a *Archive) put(mediaType string, data []byte) Descriptor {
	digest := digestOf(data)
	a.blobs[digest] = data
	return Descriptor{MediaType: mediaType, Digest: digest, Size: len(data)}
}

// pack passes the image's layers and configuration to put, and returns its
// manifest, also encoded.
func (i Image) pack(put func(mediaType string, data []byte) Descriptor) (Manifest, []byte, error) {
	manifest := Manifest{SchemaVersion: 2, MediaType: mediaManifest}
	diffIDs := []string{}
	for _, layer := range i.Layers {
		packed, err := layer.pack()
		if err != nil {
			return manifest, nil, err
		}
		diffIDs = append(diffIDs, packed.diffID)
		manifest.Layers = append(manifest.Layers, put(mediaLayer, packed.gzip))
	}
	manifest.Config = put(mediaConfig, encode(map[string]any{
		"created":      created,
		"architecture": runtime.GOARCH,
		"os":           "linux",
		"config":       i.Config,
		"rootfs":       map[string]any{"type": "layers", "diff_ids": diffIDs},
	}))
	return manifest, encode(manifest), nil
}

func (l *Layer) pack() (*packedLayer, error) {
	if l.packed != nil {
		return l.packed, nil
	}
	plain, err := l.Tree.Tar()
	if err != nil {
		return nil, err
	}
	var compressed bytes.Buffer
	writer := gzip.NewWriter(&compressed)
	if _, err := writer.Write(plain); err != nil {
		return nil, err
	}
	if err := writer.Close(); err != nil {
		return nil, err
	}
	l.packed = &packedLayer{diffID: digestOf(plain), gzip: compressed.Bytes()}
	return l.packed, nil
}

// fakeRegistry adds the directory that agnhost's fake-registry-server
// serves, with one image.
func (t Tree) fakeRegistry(root, name, tag string, image Image) error {
	add := func(kind, digest string, data []byte) {
		algorithm, hash, _ := strings.Cut(digest, ":")
		t.bytes(path.Join(root, name, kind, algorithm, hash[:2], hash, "data"), data, 0o644)
	}
	_, manifest, err := image.pack(func(mediaType string, data []byte) Descriptor {
		digest := digestOf(data)
		add("blobs", digest, data)
		return Descriptor{MediaType: mediaType, Digest: digest, Size: len(data)}
	})
	if err != nil {
		return fmt.Errorf("registry: %w", err)
	}
	add("manifests", digestOf(manifest), manifest)
	index := encode(Index{SchemaVersion: 2, MediaType: mediaIndex, Manifests: []Descriptor{{
		MediaType: mediaManifest, Digest: digestOf(manifest), Size: len(manifest), Platform: &Platform{runtime.GOARCH, "linux"},
	}}})
	add("manifests", digestOf(index), index)
	t.Text(path.Join(root, name, "manifests", tag), digestOf(index)+"\n", 0o644)
	return nil
}

func blobPath(digest string) string {
	return "blobs/" + strings.Replace(digest, ":", "/", 1)
}

func digestOf(data []byte) string {
	sum := sha256.Sum256(data)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// encode encodes types of this package, for which json.Marshal can't fail.
func encode(value any) []byte {
	data, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	return data
}
