module coracle.dev/conformance

go 1.26.0
