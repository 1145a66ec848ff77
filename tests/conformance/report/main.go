// Command report reads the results of a run of upstream's e2e suite, prints a
// line per test, and compares them with the list of tests that are known to
// pass.
//
//	report -passing passing.txt report.json          fails if a known test no longer passes
//	report -passing passing.txt -update report.json  adds the tests that passed to the list
//	report -focus passing.txt                        prints the expression that selects these tests
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("report: ")
	passing := flag.String("passing", "", "the list of tests that pass")
	update := flag.Bool("update", false, "add the tests that passed to the list")
	focus := flag.String("focus", "", "print the expression that selects the tests of this list")
	flag.Parse()

	if *focus != "" {
		known, err := readList(*focus)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(expression(known))
		return
	}
	results, err := readReport(flag.Arg(0))
	if err != nil {
		log.Fatal(err)
	}
	known, err := readList(*passing)
	if err != nil {
		log.Fatal(err)
	}
	if !printResults(results, known) {
		defer os.Exit(1)
	}
	if *update {
		if err := writeList(*passing, results, known); err != nil {
			log.Fatal(err)
		}
	}
}

// Result is the result of one test.
type Result struct {
	Name    string
	State   string // passed, failed, skipped, timedout, panicked, interrupted, aborted
	Time    time.Duration
	Message string
}

// spec has the fields of ginkgo's report that are used here.
type spec struct {
	ContainerHierarchyTexts []string
	LeafNodeType            string
	LeafNodeText            string
	State                   string
	RunTime                 time.Duration
	Failure                 struct{ Message string }
}

// readReport reads the results of the tests that were run, and failures of the
// suite itself.
func readReport(file string) ([]Result, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var suites []struct {
		SpecReports                []spec
		SpecialSuiteFailureReasons []string
	}
	if err := json.Unmarshal(data, &suites); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	var results []Result
	for _, suite := range suites {
		for _, spec := range suite.SpecReports {
			if result, ok := spec.result(); ok {
				results = append(results, result)
			}
		}
		for _, reason := range suite.SpecialSuiteFailureReasons {
			results = append(results, Result{Name: "(suite)", State: "failed", Message: reason})
		}
	}
	slices.SortFunc(results, func(a, b Result) int { return strings.Compare(a.Name, b.Name) })
	return results, nil
}

func (s spec) result() (Result, bool) {
	result := Result{State: s.State, Time: s.RunTime, Message: s.Failure.Message}
	if s.LeafNodeType != "It" {
		// Setup and teardown of the suite are reported only if they failed.
		result.Name = "(" + s.LeafNodeType + ")"
		return result, s.State != "passed" && s.State != "skipped"
	}
	result.Name = strings.Join(append(s.ContainerHierarchyTexts, s.LeafNodeText), " ")
	// Tests that were not selected are "skipped" too, but without a message.
	notSelected := (s.State == "skipped" && s.Failure.Message == "") || s.State == "pending"
	return result, !notSelected
}

// printResults prints the results; false if a known test did not pass, or no
// test was run.
func printResults(results []Result, known map[string]bool) bool {
	count := map[string]int{}
	var lost, gained []string
	for _, result := range results {
		count[result.State]++
		fmt.Printf("%-8s %6.1fs  %s\n", result.State, result.Time.Seconds(), result.Name)
		if result.State != "passed" {
			fmt.Printf("                  %s\n", strings.Join(firstLines(result.Message, 6), "\n                  "))
		}
		switch {
		case result.State == "passed" && !known[result.Name]:
			gained = append(gained, result.Name)
		case result.State != "passed" && known[result.Name]:
			lost = append(lost, result.Name)
		}
	}
	if len(results) == 0 {
		fmt.Print("no test was selected")
	}
	fmt.Println()
	for _, state := range slices.Sorted(maps.Keys(count)) {
		fmt.Printf("%s %d  ", state, count[state])
	}
	fmt.Println()
	if len(gained) > 0 {
		fmt.Printf("\n%d pass that are not on the list (UPDATE=1 adds them):\n  %s\n", len(gained), strings.Join(gained, "\n  "))
	}
	if len(lost) > 0 {
		fmt.Printf("\n%d of the list no longer pass:\n  %s\n", len(lost), strings.Join(lost, "\n  "))
	}
	return len(lost) == 0 && count["passed"] > 0
}

func firstLines(text string, count int) []string {
	lines := strings.FieldsFunc(text, func(r rune) bool { return r == '\n' })
	return lines[:min(len(lines), count)]
}

func readList(file string) (map[string]bool, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	list := map[string]bool{}
	for line := range strings.Lines(string(data)) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			list[line] = true
		}
	}
	return list, nil
}

func writeList(file string, results []Result, known map[string]bool) error {
	for _, result := range results {
		if result.State == "passed" {
			known[result.Name] = true
		}
	}
	text := strings.Join(slices.Sorted(maps.Keys(known)), "\n") + "\n"
	return os.WriteFile(file, []byte(text), 0o644)
}

// expression returns a regular expression for exactly these tests: ginkgo
// prepends the suite's name to a test's name, and appends nothing.
func expression(tests map[string]bool) string {
	var quoted []string
	for _, name := range slices.Sorted(maps.Keys(tests)) {
		quoted = append(quoted, regexp.QuoteMeta(name))
	}
	return "(" + strings.Join(quoted, "|") + ")$"
}
