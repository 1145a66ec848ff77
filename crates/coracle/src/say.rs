//! Words for the user, on standard error.

use std::fmt;
use std::io::Write;

/// Writes a line to stderr. Unlike `eprintln!` it survives a stderr that nobody reads any more.
pub fn say(line: fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
