//! Copies of programs for tests. Tests of other packages include this file by its path.

#![allow(unreachable_pub, reason = "each program includes it for itself")]

use std::path::Path;
use std::process::Command;

/// Copies a program, in a process of its own.
///
/// A test that starts a process while another one writes a program lets that process inherit the open file; until it has
/// closed the file, the program cannot be executed ("Text file busy").
///
/// # Panics
///
/// If it cannot be copied.
pub fn copy_program(from: &Path, to: &Path) {
    let status = Command::new("cp").arg(from).arg(to).status().unwrap();
    assert!(status.success(), "{status}");
}
