//! The command by which a host runs the launcher: one that it has, or this very program, sent over the same connection.
//!
//! The file that receives it is deleted before the first byte is in it, so that nothing is left whatever is killed. It
//! is run by its descriptor. A folder whose file system runs no programs is passed over: an empty file that can be run
//! is an empty script.

use std::path::Path;

/// As what a program that was sent is run.
pub(super) const PROGRAM: &str = "/proc/self/fd/4";

/// The descriptor of a program that was sent.
pub(super) const PROGRAM_FD: i32 = 4;

/// The command that receives a program of `length` bytes on its standard input and runs it. It has no character that
/// means something within single quotes to the shells of users.
pub(super) fn receiving(length: usize) -> String {
    format!(
        "exec /bin/sh -c '\
         for d in \"${{TMPDIR:-/tmp}}\" /tmp /var/tmp /dev/shm \"$HOME\"; do \
         f=$(mktemp \"$d/accel-launch.XXXXXX\" 2>/dev/null) || continue; \
         if chmod 700 \"$f\" && \"$f\" 2>/dev/null; then exec 3>\"$f\" 4<\"$f\"; rm -f \"$f\"; break; fi; \
         rm -f \"$f\"; f=; done; \
         if [ -z \"$f\" ]; then echo no folder for temporary files lets programs run >&2; exit 126; fi; \
         head -c {length} >&3; exec 3>&-; \
         if [ $(wc -c <&4) -eq {length} ]; then exec {PROGRAM} __agent; fi; exit 1'"
    )
}

/// The command that runs the program at `path`; `None` where its path cannot be written for every shell.
pub(super) fn present(path: &Path) -> Option<String> {
    let path = path.to_str()?;
    let is_plain = !path.contains(['\'', '\\', '!', '\n']);
    is_plain.then(|| format!("exec '{path}' __agent"))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn what_is_sent_is_run_and_no_file_is_left() {
        let folder = tempfile::tempdir().unwrap();
        // `cat` copies the rest of its input where it is not told otherwise: `__agent` is a file here.
        let program = std::fs::read("/bin/cat").unwrap();
        std::fs::write(folder.path().join("__agent"), "it runs").unwrap();
        let temporary = tempfile::tempdir().unwrap();
        let mut shell = Command::new("/bin/sh")
            .args(["-c", &receiving(program.len())])
            .env("TMPDIR", temporary.path())
            .current_dir(folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        shell.stdin.take().unwrap().write_all(&program).unwrap();
        let ended = shell.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&ended.stdout), "it runs");
        assert_eq!(std::fs::read_dir(temporary.path()).unwrap().count(), 0);
    }

    #[test]
    fn half_a_program_is_not_run() {
        let temporary = tempfile::tempdir().unwrap();
        let mut shell = Command::new("/bin/sh")
            .args(["-c", &receiving(1000)])
            .env("TMPDIR", temporary.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let _ = shell
            .stdin
            .take()
            .unwrap()
            .write_all(b"#!/bin/sh\necho it runs\n");
        let ended = shell.wait_with_output().unwrap();
        assert_eq!((ended.status.code(), ended.stdout.len()), (Some(1), 0));
        assert_eq!(std::fs::read_dir(temporary.path()).unwrap().count(), 0);
    }

    #[test]
    fn commands_can_be_quoted_for_every_shell() {
        let command = receiving(5);
        let script = command.strip_prefix("exec /bin/sh -c '").unwrap();
        let script = script.strip_suffix('\'').unwrap();
        assert!(!script.contains(['\'', '\\', '!', '\n']), "{script}");
        assert_eq!(
            present(Path::new("/opt/a b")).as_deref(),
            Some("exec '/opt/a b' __agent")
        );
        assert_eq!(present(Path::new("/it's")), None);
    }
}
