//! Lines for the user, on standard error.

use std::fmt;
use std::io::Write;

/// Writes a line to stderr. Ignores errors: `eprintln!` would panic if stderr is closed.
pub fn print_stderr(line: fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
