//! Lines for the user, on standard error.

use std::fmt;
use std::io::Write;

/// Writes a line to stderr. Unlike `eprintln!` it survives a closed stderr.
pub fn say(line: fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
