use std::env;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::Sender;
use std::thread;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};

use super::Slot;
use crate::error::{Error, Kind, Result};
use crate::trial::protocol::WorkerPlace;

/// What tells of a process's end.
pub(crate) trait ProcessEvent: Send + 'static {
    /// The process of that number has ended.
    fn exited(number: u32) -> Self;
}

/// A process that carries out trials, with those that it starts: a group.
#[derive(Debug)]
pub(crate) struct TrialProcess {
    child: Child,
    is_reaped: bool,
    log: PathBuf,
    /// Where the output of the present trial begins.
    log_from: u64,
}

impl TrialProcess {
    /// Starts this program again.
    pub(crate) fn start(
        place: &WorkerPlace,
        slot: &Slot,
        ranks: usize,
        log: &Path,
    ) -> Result<Self> {
        let program = this_program()?;
        let mut command = match ranks {
            1 => Command::new(&program),
            ranks => {
                let mut command = Command::new(launcher(&env::current_exe()?)?);
                command
                    .arg("--num-processes")
                    .arg(ranks.to_string())
                    .arg(&program);
                command
            }
        };
        let place = WorkerPlace {
            // Ranks are children of the launcher.
            parent: place.parent.filter(|_| ranks == 1),
            address: place.address.clone(),
            token: place.token.clone(),
            cores: place.cores.clone(),
            ..*place
        };
        let place = serde_json::to_string(&place)
            .map_err(|error| Error::misuse(error.to_string()).with_source(error))?;
        command
            .args(env::args_os().skip(1))
            .env(accelerator_env::TUNE_WORKER.name, place);
        Self::spawn(command, slot, ranks, log, Stdout::Log)
    }

    /// Starts a program, whose standard output is to be [taken](Self::take_output).
    pub(crate) fn of_command(
        words: &[String],
        slot: &Slot,
        ranks: usize,
        log: &Path,
    ) -> Result<Self> {
        let mut command = match ranks {
            1 => Command::new(&words[0]),
            ranks => {
                let mut command = Command::new(launcher(&env::current_exe()?)?);
                command
                    .arg("--num-processes")
                    .arg(ranks.to_string())
                    .arg(&words[0]);
                command
            }
        };
        command.args(&words[1..]);
        Self::spawn(command, slot, ranks, log, Stdout::Piped)
    }

    fn spawn(
        mut command: Command,
        slot: &Slot,
        ranks: usize,
        log: &Path,
        stdout: Stdout,
    ) -> Result<Self> {
        let output = OpenOptions::new().create(true).append(true).open(log);
        let output = output.map_err(|error| Error::io("write", log, error))?;
        let threads = (slot.cores.len() / ranks).max(1).to_string();
        command
            .env("CUDA_VISIBLE_DEVICES", slot.gpus.join(","))
            .stdin(Stdio::null())
            .stdout(match stdout {
                Stdout::Log => output.try_clone()?.into(),
                Stdout::Piped => Stdio::piped(),
            })
            .stderr(output)
            .process_group(0);
        for name in ["RAYON_NUM_THREADS", "OMP_NUM_THREADS"] {
            if env::var_os(name).is_none() {
                command.env(name, &threads);
            }
        }
        let program = Path::new(command.get_program()).to_owned();
        let child = command
            .spawn()
            .map_err(|error| Error::io("start", &program, error))?;
        Ok(Self {
            child,
            is_reaped: false,
            log: log.to_owned(),
            log_from: 0,
        })
    }

    /// Its standard output.
    pub(crate) fn take_output(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// Its number to the system.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Why it failed, of what is known: how it ended, and its last lines.
    pub(crate) fn failure(&self, status: Option<ExitStatus>) -> String {
        let how = status.map_or_else(
            || "its process ended".to_owned(),
            |status| format!("its process ended: {status}"),
        );
        let lines = self.last_lines();
        match lines.is_empty() {
            true => how,
            false => format!("{how}; its last lines:\n{lines}"),
        }
    }

    /// Tells when it has ended. It is left unreaped, so that its id stays its own.
    pub(crate) fn watch<E: ProcessEvent>(&self, number: u32, events: Sender<E>) -> Result<()> {
        let pid = self.pid();
        thread::Builder::new()
            .name("watch".to_owned())
            .spawn(move || {
                let Some(pid) = pid else { return };
                let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
                while let Err(rustix::io::Errno::INTR) =
                    rustix::process::waitid(WaitId::Pid(pid), options)
                {}
                // Nobody listens once the search has ended.
                let _ = events.send(E::exited(number));
            })?;
        Ok(())
    }

    /// Asks it to end.
    pub(crate) fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// Ends it, and what it has started.
    pub(crate) fn kill(&mut self) {
        self.signal(Signal::KILL);
    }

    /// Takes its end. What it has started ends, too.
    pub(crate) fn reap(&mut self) -> Option<ExitStatus> {
        self.signal(Signal::KILL);
        let status = self.child.wait().ok();
        self.is_reaped = true;
        status
    }

    /// What it writes from here on is the next trial's.
    pub(crate) fn mark_log(&mut self) {
        self.log_from = self.log.metadata().map_or(0, |log| log.len());
    }

    /// The end of what it has written since then.
    fn last_lines(&self) -> String {
        let read = || -> std::io::Result<String> {
            let mut log = File::open(&self.log)?;
            let from = self
                .log_from
                .max(log.metadata()?.len().saturating_sub(TAIL_BYTES));
            log.seek(SeekFrom::Start(from))?;
            let mut bytes = Vec::new();
            log.read_to_end(&mut bytes)?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        let text = read().unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
    }

    fn signal(&self, signal: Signal) {
        if let (false, Some(pid)) = (self.is_reaped, self.pid()) {
            // That nothing is left to receive it is no error.
            let _ = rustix::process::kill_process_group(pid, signal);
        }
    }

    fn pid(&self) -> Option<Pid> {
        Pid::from_raw(self.child.id().cast_signed())
    }
}

/// Where standard output goes.
#[derive(Clone, Copy, Debug)]
enum Stdout {
    Log,
    Piped,
}

const TAIL_BYTES: u64 = 8 << 10;
const TAIL_LINES: usize = 10;

/// This program, which may have been built anew meanwhile: its trials are of the same version.
fn this_program() -> Result<PathBuf> {
    let program = env::current_exe()?;
    // The system appends a word to the name where the file is gone.
    Ok(match program.exists() {
        true => program,
        false => format!("/proc/{}/exe", std::process::id()).into(),
    })
}

/// `accel-launch`: beside this program or in the folder above, as cargo leaves it, or on the PATH.
fn launcher(program: &Path) -> Result<OsString> {
    let name = "accel-launch";
    let folders = program.ancestors().skip(1).take(2);
    let mut beside = folders.map(|folder| folder.join(name));
    if let Some(launcher) = beside.find(|path| path.is_file()) {
        return Ok(launcher.into());
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let mut on_path = env::split_paths(&path).map(|folder| folder.join(name));
    let found = on_path.find(|path| path.is_file());
    found.map(Into::into).ok_or_else(|| {
        Error::new(
            Kind::NotFound,
            "trials of several processes are started by `accel-launch`, which is neither beside this program nor on the PATH; \
             install it: cargo install accel-launch",
        )
    })
}
