module coracle.dev/bench/wire

go 1.26.0
