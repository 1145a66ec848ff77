// Command images writes the images of upstream's e2e tests into one archive,
// with neither a container engine nor a registry: programs built from upstream's
// sources on top of files of Debian packages. Builds are reproducible.
//
// Start reading at recipes.go, which defines the content of each image. tree.go
// creates layers, archive.go writes them.
package main

import (
	"bufio"
	"flag"
	"fmt"
	"log"
	"os"
	"path"
	"strings"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("images: ")
	wanted := flag.String("wanted", "", "file with the wanted images, one reference per line")
	out := flag.String("out", "", "archive to write")
	var from Sources
	flag.StringVar(&from.Programs, "programs", "", "directory of the programs")
	flag.StringVar(&from.Packages, "packages", "", "directory of BASE.packages, lists of package files")
	flag.StringVar(&from.Debs, "debs", "", "directory of the package files")
	flag.StringVar(&from.Upstream, "upstream", "", "upstream's test/images")
	flag.Parse()
	if err := run(*wanted, *out, from); err != nil {
		log.Fatal(err)
	}
}

// coracleRegistry is the registry name of images for Coracle's own tests. It
// does not exist.
const coracleRegistry = "coracle.test"

// Sources has the directories of the inputs.
type Sources struct {
	Programs, Packages, Debs, Upstream string
}

func run(wanted, out string, from Sources) error {
	references, err := readLines(wanted)
	if err != nil {
		return err
	}
	recipes, err := Recipes(from)
	if err != nil {
		return err
	}
	archive := NewArchive()
	var unknown []string
	for _, reference := range references {
		image, ok := recipes[repository(reference)]
		if !ok {
			unknown = append(unknown, reference)
			continue
		}
		if err := archive.Add(reference, image); err != nil {
			return fmt.Errorf("%s: %w", reference, err)
		}
	}
	if len(unknown) > 0 {
		log.Printf("%d of %d have no recipe: %s …", len(unknown), len(references), strings.Join(unknown[:min(3, len(unknown))], " "))
	}
	return archive.WriteFile(out)
}

// repository returns the key of Recipes for a reference: the last component of
// its path, without the tag.
func repository(reference string) string {
	name, _, _ := strings.Cut(path.Base(reference), ":")
	registry, _, _ := strings.Cut(reference, "/")
	// Images of private and invalid registries are for tests of failing pulls.
	if registry != "registry.k8s.io" && registry != coracleRegistry {
		return ""
	}
	return name
}

func readLines(file string) ([]string, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var lines []string
	scanner := bufio.NewScanner(f)
	for scanner.Scan() {
		if line := strings.TrimSpace(scanner.Text()); line != "" {
			lines = append(lines, line)
		}
	}
	return lines, scanner.Err()
}
