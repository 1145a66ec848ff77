// Command registry serves the images of an archive (tests/conformance/images)
// under their names, regardless of the registry in those names: a mirror for
// tests that always pull. Plain HTTP, read-only.
//
//	registry -listen :5000 images.tar
package main

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"strings"
	"time"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("registry: ")
	listen := flag.String("listen", ":5000", "address to listen on")
	flag.Parse()
	registry, err := Open(flag.Arg(0))
	if err != nil {
		log.Fatal(err)
	}
	log.Fatal(http.ListenAndServe(*listen, registry))
}

// Registry serves the images of an archive.
type Registry struct {
	// Blobs, manifests among them, by digest.
	blobs map[string]*io.SectionReader
	// Manifests by repository and tag.
	tags map[string]Descriptor
	// Media types of manifests by digest.
	types map[string]string
}

// Descriptor is the OCI content descriptor of a manifest.
type Descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Annotations map[string]string `json:"annotations"`
}

// Open reads an archive's index and the positions of its blobs.
func Open(file string) (*Registry, error) {
	archive, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	registry := &Registry{blobs: map[string]*io.SectionReader{}, tags: map[string]Descriptor{}, types: map[string]string{}}
	reader := tar.NewReader(archive)
	for {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return registry, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if header.Name == "index.json" {
			if err := registry.readIndex(reader); err != nil {
				return nil, fmt.Errorf("%s: index.json: %w", file, err)
			}
			continue
		}
		if hash, ok := strings.CutPrefix(header.Name, "blobs/sha256/"); ok && header.Typeflag == tar.TypeReg {
			// tar.Reader does not read ahead, so this is the position of the blob.
			position, err := archive.Seek(0, io.SeekCurrent)
			if err != nil {
				return nil, err
			}
			registry.blobs["sha256:"+hash] = io.NewSectionReader(archive, position, header.Size)
		}
	}
}

func (r *Registry) readIndex(from io.Reader) error {
	var index struct{ Manifests []Descriptor }
	if err := json.NewDecoder(from).Decode(&index); err != nil {
		return err
	}
	for _, manifest := range index.Manifests {
		_, name, _ := strings.Cut(manifest.Annotations["io.containerd.image.name"], "/")
		r.tags[name] = manifest
		r.types[manifest.Digest] = manifest.MediaType
	}
	return nil
}

// ServeHTTP serves GET and HEAD of /v2/, manifests and blobs.
func (r *Registry) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	if request.Method != http.MethodGet && request.Method != http.MethodHead {
		respondError(w, http.StatusMethodNotAllowed, "UNSUPPORTED")
		return
	}
	path, ok := strings.CutPrefix(request.URL.Path, "/v2/")
	if ok && path == "" {
		return
	}
	if name, reference, found := strings.Cut(path, "/manifests/"); ok && found {
		digest := reference
		if !strings.HasPrefix(reference, "sha256:") {
			digest = r.tags[name+":"+reference].Digest
		}
		r.serve(w, request, digest, r.types[digest], "MANIFEST_UNKNOWN")
		return
	}
	if _, digest, found := strings.Cut(path, "/blobs/"); ok && found {
		r.serve(w, request, digest, "application/octet-stream", "BLOB_UNKNOWN")
		return
	}
	respondError(w, http.StatusNotFound, "NAME_UNKNOWN")
}

func (r *Registry) serve(w http.ResponseWriter, request *http.Request, digest, mediaType, unknown string) {
	blob, ok := r.blobs[digest]
	if !ok || mediaType == "" {
		respondError(w, http.StatusNotFound, unknown)
		return
	}
	w.Header().Set("Content-Type", mediaType)
	w.Header().Set("Docker-Content-Digest", digest)
	// Each request needs its own read position.
	http.ServeContent(w, request, "", time.Time{}, io.NewSectionReader(blob, 0, blob.Size()))
}

func respondError(w http.ResponseWriter, status int, code string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	fmt.Fprintf(w, `{"errors":[{"code":%q}]}`, code)
}
