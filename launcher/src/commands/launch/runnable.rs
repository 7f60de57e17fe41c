//! The check that a program runs on this host: by its file and the host's loader, before any rank of the job starts.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use accelerator_collective::internal::TargetFeatures;
use accelerator_host::machine::host_name;

use crate::error::{Error, Result};
use crate::event::Channel;
use crate::supervisor::group::{Stderr, ToolOutput, run_tool};
use crate::text::{needed_glibc, shell_word};

/// Checks that the system finds the interpreter in the first line of a script. Any other program passes.
///
/// # Errors
/// When it does not: the error gives the reason and the remedy.
pub(super) fn check_first_line(program: &Path) -> Result<()> {
    match unusable_first_line(program) {
        Some(why) => refused(program, &why),
        None => Ok(()),
    }
}

/// Checks the processor that `program` is for, its loader, its libraries and their versions, and the features of the
/// processor that it was compiled for. A script passes, and so does a file that cannot be judged: its start will tell.
///
/// # Errors
/// When it does not run here: the error names this host, what is expected and found, and what to do. When a signal
/// arrives.
pub(super) fn check(program: &Path, channel: &Channel) -> Result<()> {
    let Ok(Some(elf)) = Elf::read(program) else {
        return Ok(());
    };
    let refused = |why: String| refused(program, &why);
    if let Some(other) = elf.other_machine() {
        return refused(other);
    }
    if let Some(loader) = &elf.loader {
        if is_missing(loader) {
            return refused(format!(
                "it needs the loader {}, which is not there, as where the host has another C library; {REBUILD}",
                loader.display()
            ));
        }
        if let Some(lacking) = lacking(loader, program, channel)? {
            return refused(lacking);
        }
    }
    let contents = elf.contents(program).ok();
    let compiled = contents.and_then(|contents| TargetFeatures::of_program(&contents));
    match compiled.as_ref().map(TargetFeatures::missing) {
        Some(missing) if !missing.is_empty() => refused(format!(
            "it was compiled for a processor with {}, which the one here lacks; compile it without \
             `-C target-cpu=native`, or for the oldest processor among the hosts",
            missing.join(", ")
        )),
        _ => Ok(()),
    }
}

fn refused(program: &Path, why: &str) -> Result<()> {
    Err(Error::usage(format!(
        "{} does not run on host {}: {why}",
        program.display(),
        host_name()
    )))
}

/// Returns why the system does not find the interpreter in the first line of a script; `None` if it does, and for
/// anything but a script.
fn unusable_first_line(program: &Path) -> Option<String> {
    let shown = shell_word(program);
    let mut line = Vec::new();
    let file = File::open(program).ok()?.take(LONGEST_FIRST_LINE);
    BufReader::new(file).read_until(b'\n', &mut line).ok()?;
    if line.starts_with(b"\xef\xbb\xbf#!") {
        return Some(format!(
            "a byte order mark stands before its `#!`, as editors of Windows write it; remove it: \
             sed -i '1s/^\\xef\\xbb\\xbf//' {shown}"
        ));
    }
    let line = line.strip_prefix(b"#!")?;
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    let words: Vec<&[u8]> = line
        .split(|byte| b" \t".contains(byte))
        .filter(|word| !word.is_empty())
        .collect();
    let interpreter = Path::new(OsStr::from_bytes(words.first()?));
    let is_env = interpreter.file_name().is_some_and(|name| name == "env");
    // Another interpreter may accept an argument that ends so.
    if words.last()?.ends_with(b"\r") && (words.len() == 1 || words.len() == 2 && is_env) {
        return Some(format!(
            "its first line, `#!{}`, ends in a carriage return, as editors of Windows write it, and the system takes that \
             for a part of the name; remove those of all lines: sed -i 's/\\r$//' {shown}",
            text(line).trim()
        ));
    }
    is_missing(interpreter).then(|| {
        format!(
            "its first line names the interpreter {}, which is not there; install it there, or correct the line",
            interpreter.display()
        )
    })
}

/// Checks if there is no such file. One that this user may not look at could be there.
fn is_missing(path: &Path) -> bool {
    path.metadata()
        .is_err_and(|error| matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory))
}

/// More bytes than the system reads of the first line of a script.
const LONGEST_FIRST_LINE: u64 = 4096;

/// The advice for a program that was linked for another system.
const REBUILD: &str = "build it on the oldest of the hosts, or link it statically \
    (`--target x86_64-unknown-linux-musl`)";

/// Returns the loader's account of the libraries that `program` needs and this host lacks. It loads the program but runs
/// none of it.
fn lacking(loader: &Path, program: &Path, channel: &Channel) -> Result<Option<String>> {
    let name = loader.file_name().unwrap_or_default().to_string_lossy();
    if !name.starts_with("ld") {
        // Nobody knows the effect of running it.
        return Ok(None);
    }
    let ask = |arguments: &[&Path]| -> Result<Option<ToolOutput>> {
        let mut command = Command::new(loader);
        command.args(arguments);
        match run_tool(command, Stderr::Keep, channel) {
            Ok(said) => Ok(Some(said)),
            Err(error) if error.is_interrupted() => Err(error),
            Err(_) => Ok(None),
        }
    };
    let Some(said) = ask(&[Path::new("--list"), program])? else {
        return Ok(None);
    };
    let lacking = lacks(&said, program).join("; ");
    if let Some(needed) = needed_glibc(&lacking) {
        let found = ask(&[Path::new("--version")])?.and_then(|said| version(&said.stdout));
        let found = found.unwrap_or_else(|| "older".to_owned());
        return Ok(Some(format!(
            "it needs {needed}, and the C library there is {found}; {REBUILD}"
        )));
    }
    Ok((!lacking.is_empty())
        .then(|| format!("{lacking}; install it there, or name its folder in LD_LIBRARY_PATH")))
}

/// The lines in which a loader says that something is missing.
fn lacks(said: &ToolOutput, program: &Path) -> Vec<String> {
    const SIGNS: [&str; 5] = [
        "not found",
        "cannot open shared object",
        "rror loading shared library",
        "rror relocating",
        "CPU ISA level",
    ];
    let (stdout, stderr) = (text(&said.stdout), text(&said.stderr));
    // `libx.so.1 => not found`
    let missing = stdout.lines().filter_map(|line| {
        let (name, rest) = line.trim().split_once(" => ")?;
        rest.contains("not found")
            .then(|| format!("the shared library {name} is not found"))
    });
    let begin = format!("{}: ", program.display());
    let said = stderr
        .lines()
        .map(|line| line.trim().trim_start_matches(&begin));
    // Errors of LD_PRELOAD.
    let said = said.filter(|line| !line.ends_with("ignored."));
    let said = said.filter(|line| SIGNS.iter().any(|sign| line.contains(sign)));
    missing.chain(said.map(str::to_owned)).collect()
}

/// "glibc 2.36", from "ld.so (Debian GLIBC 2.36-9+deb12u4) stable release version 2.36."
fn version(said: &[u8]) -> Option<String> {
    let said = text(said);
    let (_, rest) = said.split_once("release version ")?;
    let end = rest.find(|one: char| one != '.' && !one.is_ascii_digit());
    let version = rest[..end.unwrap_or(rest.len())].trim_end_matches('.');
    Some(format!("glibc {version}"))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The header of an ELF file.
#[derive(Debug)]
struct Elf {
    machine: u16,
    /// The loader, if the program is linked dynamically.
    loader: Option<PathBuf>,
    /// The offsets and lengths in the file of the parts that are loaded.
    loaded: Vec<(u64, u64)>,
}

/// Numbers of `e_machine`, and their names.
const MACHINES: [(u16, &str); 8] = [
    (3, "x86"),
    (21, "powerpc64"),
    (22, "s390x"),
    (40, "arm"),
    (62, "x86_64"),
    (183, "aarch64"),
    (243, "riscv64"),
    (258, "loongarch64"),
];

/// Programs of 32 bits that a processor of 64 bits runs.
const COMPATIBLE: [(u16, u16); 2] = [(62, 3), (183, 40)];

/// The largest part of a file that is read at once.
const MAX_PART: u64 = 1 << 30;

impl Elf {
    /// Reads it; `None` for another kind of file. If it has 32 bits or another byte order, only the machine is read.
    fn read(path: &Path) -> io::Result<Option<Self>> {
        let file = File::open(path)?;
        let mut head = [0; 64];
        let length = (&file).take(64).read(&mut head)?;
        if length < head.len() || !head.starts_with(b"\x7fELF") {
            return Ok(None);
        }
        let number = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
        let [class, order] = [head[4], head[5]];
        let machine = match order {
            2 => number(18).swap_bytes(),
            _ => number(18),
        };
        let mut elf = Self {
            machine,
            loader: None,
            loaded: Vec::new(),
        };
        if (class, order) != (2, 1) {
            return Ok(Some(elf));
        }
        let [size, count] = [number(54), number(56)];
        let table = part(&file, long(&head, 32), u64::from(size) * u64::from(count))?;
        for entry in table.chunks_exact(usize::from(size).max(56)) {
            const LOAD: u32 = 1;
            const INTERP: u32 = 3;
            let kind = u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]);
            let (at, length) = (long(entry, 8), long(entry, 32));
            match kind {
                LOAD => elf.loaded.push((at, length)),
                INTERP => {
                    let name = part(&file, at, length.min(4096))?;
                    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
                    elf.loader = Some(PathBuf::from(OsStr::from_bytes(name)));
                }
                _ => {}
            }
        }
        Ok(Some(elf))
    }

    /// Describes the mismatch if it is for another processor than the one that this very program runs on.
    fn other_machine(&self) -> Option<String> {
        let own = Self::read(Path::new("/proc/self/exe")).ok()??.machine;
        let is_own = self.machine == own || COMPATIBLE.contains(&(own, self.machine));
        // An emulator may be set up for it, with the loader.
        let is_emulated = self.loader.as_ref().is_some_and(|loader| loader.exists());
        (!is_own && !is_emulated).then(|| {
            format!(
                "it is for {}, and this host is {}; build it for this host",
                name_of(self.machine),
                name_of(own)
            )
        })
    }

    /// Reads the parts of its file that are loaded.
    fn contents(&self, path: &Path) -> io::Result<Vec<u8>> {
        let file = File::open(path)?;
        let mut all = Vec::new();
        for (at, length) in &self.loaded {
            all.extend(part(&file, *at, *length)?);
        }
        Ok(all)
    }
}

fn name_of(machine: u16) -> String {
    let known = MACHINES.iter().find(|(number, _)| *number == machine);
    known.map_or_else(
        || format!("machine {machine}"),
        |(_, name)| (*name).to_owned(),
    )
}

/// The little-endian number of 8 bytes at `at`.
fn long(bytes: &[u8], at: usize) -> u64 {
    let bytes = bytes[at..at + 8].iter().rev();
    bytes.fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn part(file: &File, at: u64, length: u64) -> io::Result<Vec<u8>> {
    let length = length.min(MAX_PART).min(file.metadata()?.len());
    // At most 1 GiB.
    let mut bytes = vec![0; length as usize];
    file.read_exact_at(&mut bytes, at)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A changed copy of a program.
    fn changed(folder: &Path, change: impl FnOnce(&mut Vec<u8>)) -> PathBuf {
        let mut program = std::fs::read("/bin/cat").unwrap();
        change(&mut program);
        let path = folder.join("train");
        std::fs::write(&path, program).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn replace(program: &mut [u8], from: &[u8], to: &[u8]) {
        assert_eq!(from.len(), to.len());
        let mut at = 0;
        while let Some(found) = program[at..]
            .windows(from.len())
            .position(|window| window == from)
        {
            program[at + found..at + found + to.len()].copy_from_slice(to);
            at += found + to.len();
        }
        assert!(at > 0, "it has {}", String::from_utf8_lossy(from));
    }

    fn why(program: &Path) -> String {
        check(program, &Channel::new()).unwrap_err().to_string()
    }

    #[test]
    fn what_runs_here_passes() {
        let own = std::env::current_exe().unwrap();
        for program in [Path::new("/bin/cat"), &own, Path::new("Cargo.toml")] {
            check(program, &Channel::new()).unwrap();
        }
    }

    #[test]
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn a_program_that_does_not_run_here_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let foreign = changed(path, |program| {
            program[18..20].copy_from_slice(&22_u16.to_le_bytes());
            replace(program, b"/ld-linux", b"/no-linux");
        });
        assert!(why(&foreign).contains("it is for s390x, and this host is"));
        let other = changed(path, |program| replace(program, b"/ld-linux", b"/no-linux"));
        assert!(why(&other).contains("it needs the loader /"));
        let library = changed(path, |program| replace(program, b"libc.so.6", b"libx.so.6"));
        let found = why(&library);
        assert!(
            found.contains(": error while loading shared libraries: libx.so.6: "),
            "{found}"
        );
        assert!(found.contains("; install it there"), "{found}");
        let newer = changed(path, |program| replace(program, b"GLIBC_2.3", b"GLIBC_9.3"));
        let why = why(&newer);
        for text in [
            &format!("train does not run on host {}", host_name()),
            ": it needs GLIBC_9.3",
            ", and the C library there is glibc 2.",
            "; build it on the oldest",
        ] {
            assert!(why.contains(text), "{text}: {why}");
        }
    }

    #[test]
    fn a_script_whose_interpreter_is_not_found_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.sh");
        for (text, part) in [
            (
                &b"#!/bin/sh\r\nexit\r\n"[..],
                "`#!/bin/sh`, ends in a carriage return",
            ),
            (
                b"#! /usr/bin/env python3\r\n",
                "`#!/usr/bin/env python3`, ends in a carriage return",
            ),
            (
                b"\xef\xbb\xbf#!/bin/sh\n",
                "a byte order mark stands before its `#!`",
            ),
            (
                b"#!/no/such/python3 -u\n",
                "names the interpreter /no/such/python3, which is not there",
            ),
            (
                b"#!/no/such/sh",
                "names the interpreter /no/such/sh, which is not there",
            ),
        ] {
            std::fs::write(&path, text).unwrap();
            let why = check_first_line(&path).unwrap_err().to_string();
            assert!(why.contains(part), "{part}: {why}");
        }
        let interpreter = folder.path().join(OsStr::from_bytes(b"sh\xe9"));
        std::fs::write(&interpreter, "").unwrap();
        let latin = [b"#!", interpreter.as_os_str().as_bytes(), b"\n"].concat();
        for text in [
            &latin[..],
            b"#!/bin/sh\nexit\r\n",
            b"#!/bin/sh -e\r\n",
            b"#!\n",
            b"echo",
            b"",
        ] {
            std::fs::write(&path, text).unwrap();
            check_first_line(&path).unwrap();
        }
    }

    /// The file of a program that is linked statically, and has this constant.
    fn program_with(constant: &[u8]) -> Vec<u8> {
        let mut file = std::fs::read("/proc/self/exe").unwrap();
        file.truncate(64);
        let (head, entry) = (64_u64, 56_u16);
        file[4..6].copy_from_slice(&[2, 1]);
        file[32..40].copy_from_slice(&head.to_le_bytes());
        file[54..56].copy_from_slice(&entry.to_le_bytes());
        file[56..58].copy_from_slice(&1_u16.to_le_bytes());
        let mut load = [0; 56];
        load[0] = 1;
        load[4] = 4;
        load[8..16].copy_from_slice(&(head + u64::from(entry)).to_le_bytes());
        load[32..40].copy_from_slice(&(constant.len() as u64).to_le_bytes());
        file.extend(load);
        file.extend(constant);
        file
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn a_program_for_another_processor_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train");
        // The test above reads the constants of this very program, which should not have it.
        let mark = "of accelerate target_features:sse3,avx512fp16,another-one,\nmore";
        let mark = mark.replacen('_', " ", 1);
        std::fs::write(&path, program_with(mark.as_bytes())).unwrap();
        match std::arch::is_x86_feature_detected!("avx512fp16") {
            true => check(&path, &Channel::new()).unwrap(),
            false => {
                let why = why(&path);
                assert!(why.contains("a processor with avx512fp16, which"), "{why}");
            }
        }
        std::fs::write(&path, program_with(b"nothing of it")).unwrap();
        check(&path, &Channel::new()).unwrap();
    }

    #[test]
    fn loaders_tell_their_version() {
        for said in [
            "ld.so (Debian GLIBC 2.36-9+deb12u4) stable release version 2.36.\nCopyright",
            "ld.so (GNU libc) stable release version 2.36\n",
        ] {
            assert_eq!(version(said.as_bytes()).as_deref(), Some("glibc 2.36"));
        }
        assert_eq!(version(b"musl libc"), None);
    }
}
