//! The command by which a host runs the launcher: one that it has, or this very program, sent over the same connection.
//!
//! The file that receives it is deleted before the first byte is in it, so that nothing is left whatever is killed. It
//! is run by its descriptor. A folder whose file system runs no programs is passed over: an empty file that can be run
//! is an empty script.

use std::path::Path;

use accelerator_collective::launcher::TargetFeatures;

/// The path by which a program that was sent is run.
pub(super) const PROGRAM: &str = "/proc/self/fd/4";

/// The descriptor of a program that was sent.
pub(super) const PROGRAM_FD: i32 = 4;

/// The command that receives a program of `length` bytes on its standard input and runs it. It has no character that
/// means something within single quotes to the shells of users.
pub(super) fn receiving(length: usize) -> String {
    format!(
        "exec /bin/sh -c '{}\
         for d in \"${{TMPDIR:-/tmp}}\" /tmp /var/tmp /dev/shm \"$HOME\"; do \
         f=$(mktemp \"$d/accel-launch.XXXXXX\" 2>/dev/null) || continue; \
         if chmod 700 \"$f\" && \"$f\" 2>/dev/null; then exec 3>\"$f\" 4<\"$f\"; rm -f \"$f\"; break; fi; \
         rm -f \"$f\"; f=; done; \
         if [ -z \"$f\" ]; then echo no folder for temporary files lets programs run >&2; exit 126; fi; \
         head -c {length} >&3; exec 3>&-; \
         if [ $(wc -c <&4) -eq {length} ]; then exec {PROGRAM} __agent; fi; exit 1'",
        checking(
            std::env::consts::ARCH,
            &TargetFeatures::of_this_program().names()
        )
    )
}

/// Returns a script that refuses a host whose processor cannot run this program: by its kind, and by the flags of the
/// features that the program was compiled for. The program itself could only end by a signal there.
fn checking(machine: &str, features: &[&str]) -> String {
    let mut script = String::new();
    if ["x86_64", "aarch64"].contains(&machine) {
        script = format!(
            "m=$(uname -m); [ \"$m\" = {machine} ] || {{ \
             echo \"{NEEDS} a processor of kind {machine}, and it is of kind $m\" >&2; exit 126; }}; "
        );
    }
    let flags: Vec<String> = features.iter().map(|feature| flag(feature)).collect();
    if machine == "x86_64" && !flags.is_empty() {
        script.push_str(&format!(
            "if [ -r /proc/cpuinfo ]; then l=; for x in {}; do \
             grep -qw \"$x\" /proc/cpuinfo || l=\"$l $x\"; done; \
             [ -z \"$l\" ] || {{ echo \"{NEEDS} a processor with$l\" >&2; exit 126; }}; fi; ",
            flags.join(" ")
        ));
    }
    script
}

/// Begins what a host says that cannot run the program.
pub(super) const NEEDS: &str = "this accel-launch needs";

/// Returns the name of a processor feature in Linux's `/proc/cpuinfo`.
fn flag(feature: &str) -> String {
    match feature {
        "cmpxchg16b" => "cx16".to_owned(),
        "lzcnt" => "abm".to_owned(),
        "sha" => "sha_ni".to_owned(),
        "sse3" => "pni".to_owned(),
        "avx512bf16" | "avx512bitalg" | "avx512fp16" | "avx512vbmi2" | "avx512vnni"
        | "avx512vpopcntdq" => feature.replace("avx512", "avx512_"),
        _ => feature.replace('.', "_"),
    }
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
    fn a_processor_that_does_not_run_the_program_is_refused_before_it_is_run() {
        let run = |machine, features: &[&str]| {
            let script = checking(machine, features) + "echo it runs";
            let shell = Command::new("/bin/sh").args(["-c", &script]).output();
            let ended = shell.unwrap();
            let said = [ended.stdout, ended.stderr].concat();
            (
                ended.status.code(),
                String::from_utf8(said).unwrap().trim().to_owned(),
            )
        };
        let (here, other) = match std::env::consts::ARCH {
            "aarch64" => ("aarch64", "x86_64"),
            here => (here, "aarch64"),
        };
        assert_eq!(run(here, &[]), (Some(0), "it runs".to_owned()));
        let (code, said) = run(other, &[]);
        assert_eq!(code, Some(126));
        assert!(
            said.starts_with(&format!(
                "{NEEDS} a processor of kind {other}, and it is of kind "
            )),
            "{said}"
        );
        if here == "x86_64" {
            assert_eq!(
                run(here, &["sse4.2", "no.such", "sse3", "nor-this"]),
                (
                    Some(126),
                    format!("{NEEDS} a processor with no_such nor-this")
                )
            );
        }
    }

    #[test]
    fn commands_can_be_quoted_for_every_shell() {
        let checks = checking("x86_64", &["avx2"]);
        assert!(!checks.contains(['\'', '\\', '!', '\n']), "{checks}");
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
