//! Measures the host of a rank.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use accelerator_host::machine::{Memory, nvidia_smi};

use crate::error::{Error, Kind, Result};
use crate::journal::{JOURNAL, JournalWriter, now_ms, rank_journal};
use crate::record::{Number, Record};

/// Measures what a rank and its host use, every few seconds, into the folder of a run: on a thread, from
/// [`start`](Self::start) until it is dropped, and once at both ends.
///
/// | name | |
/// |---|---|
/// | `cpu` | how many cores the process uses |
/// | `memory` | what of it is in main memory, in bytes |
/// | `host_cpu` | how busy the cores of the host are, from 0 to 1 |
/// | `host_memory` | what is used of the host's memory, in bytes |
/// | `gpu0`, … | how busy a GPU is, from 0 to 1: those that `CUDA_VISIBLE_DEVICES` names, or all |
/// | `gpu0_memory`, … | what is used of its memory, in bytes |
///
/// CPU and memory are measured on Linux, GPUs if there is an `nvidia-smi`.
///
/// ```
/// use std::time::Duration;
///
/// use accelerator_track::{Run, RunHistory, internal::SystemSampler};
///
/// # let temporary = tempfile::tempdir().unwrap();
/// let run = Run::builder("mnist").runs_folder(temporary.path()).start()?;
/// let sampler = SystemSampler::start(run.folder(), 3, Duration::from_secs(10))?;
/// // Train here.
/// drop(sampler);
/// let measured = RunHistory::read(run.folder())?.system;
/// # #[cfg(target_os = "linux")]
/// assert!(measured[&3]["memory"].iter().all(|point| point.value > 1e6));
/// # Ok::<(), accelerator_track::Error>(())
/// ```
#[derive(Debug)]
pub struct SystemSampler {
    /// Dropping it stops the thread.
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl SystemSampler {
    /// Starts sampling for the run in that folder. After a restart of the rank it continues in the same file.
    ///
    /// # Errors
    ///
    /// If there is no run, as on a host that does not share the folder, or its files cannot be written.
    pub fn start(folder: impl AsRef<Path>, rank: usize, interval: Duration) -> Result<Self> {
        let probe = Probe::new(PathBuf::from("nvidia-smi"));
        Self::with_probe(folder.as_ref(), rank, interval, probe)
    }

    fn with_probe(folder: &Path, rank: usize, interval: Duration, probe: Probe) -> Result<Self> {
        if !folder.join(JOURNAL).exists() {
            return Err(Error::new(
                Kind::NotFound,
                format!("there is no run in {}", folder.display()),
            ));
        }
        let path = rank_journal(folder, rank);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)
                .map_err(|error| Error::io("create the folder", parent, error))?;
        }
        let journal = match path.exists() {
            true => JournalWriter::open(&path, drop)?,
            false => JournalWriter::create(&path)?,
        };
        let (stop, stopped) = mpsc::channel();
        let thread = thread::Builder::new()
            .name("run-system".to_owned())
            .spawn(move || sample(journal, probe, interval, &stopped))
            .map_err(|error| Error::new(Kind::Io, format!("no thread for the system: {error}")))?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for SystemSampler {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // The thread's panic has been printed.
            let _ = thread.join();
        }
    }
}

fn sample(
    mut journal: JournalWriter,
    mut probe: Probe,
    interval: Duration,
    stopped: &mpsc::Receiver<()>,
) {
    let mut is_last = false;
    let mut has_warned = false;
    loop {
        let values = probe.measure();
        journal.append(now_ms(), Record::System { values });
        if let Err(error) = journal.flush()
            && !has_warned
        {
            has_warned = true;
            tracing::warn!(%error, "what the system uses cannot be written now; training continues");
        }
        if is_last {
            return;
        }
        is_last = stopped.recv_timeout(interval) != Err(RecvTimeoutError::Timeout);
    }
}

/// Asks the system.
#[derive(Debug)]
struct Probe {
    /// `None` if it did not answer: it will not later.
    nvidia_smi: Option<PathBuf>,
    /// The GPUs, in the words of `CUDA_VISIBLE_DEVICES`.
    visible: Option<String>,
    before: Option<Used>,
}

/// Time that the process and the host used since the start.
#[derive(Clone, Copy, Debug)]
struct Used {
    at: Instant,
    /// The process's time in seconds.
    process: f64,
    /// The host's busy time and all of its time, in any unit.
    host: (f64, f64),
}

impl Probe {
    fn new(nvidia_smi: PathBuf) -> Self {
        let visible = std::env::var("CUDA_VISIBLE_DEVICES");
        Self {
            nvidia_smi: Some(nvidia_smi),
            visible: visible.ok().filter(|visible| !visible.is_empty()),
            before: None,
        }
    }

    fn measure(&mut self) -> BTreeMap<String, Number> {
        let mut values = BTreeMap::new();
        let mut put = |name: &str, value: Option<f64>| {
            values.extend(value.map(|value| (name.to_owned(), Number(value))));
        };
        let now = used();
        if let (Some(before), Some(now)) = (self.before, now) {
            let seconds = now.at.duration_since(before.at).as_secs_f64();
            // In a shorter time, only the clock's ticks would show.
            if seconds >= SHORTEST {
                put("cpu", Some((now.process - before.process) / seconds));
                let (busy, all) = (now.host.0 - before.host.0, now.host.1 - before.host.1);
                put("host_cpu", (all > 0.0).then(|| busy / all));
            }
        }
        self.before = now;
        put(
            "memory",
            Memory::of_this_process().map(|bytes| bytes as f64),
        );
        let in_use = |memory: Memory| memory.total.saturating_sub(memory.available) as f64;
        put("host_memory", Memory::of_this_machine().map(in_use));
        for (index, busy, memory) in self.gpus() {
            put(&format!("gpu{index}"), busy);
            put(&format!("gpu{index}_memory"), memory);
        }
        values
    }

    /// Index, share of time that it was busy, bytes in use.
    fn gpus(&mut self) -> Vec<(u32, Option<f64>, Option<f64>)> {
        let Some(program) = &self.nvidia_smi else {
            return Vec::new();
        };
        let query = "index,utilization.gpu,memory.used";
        let rows = nvidia_smi(program, query, self.visible.as_deref(), LONGEST_ANSWER);
        if rows.is_empty() {
            self.nvidia_smi = None;
        }
        let gpu = |row: Vec<String>| {
            // A GPU that is divided says `[N/A]`.
            let number = |value: &String| value.parse::<f64>().ok();
            let [index, percent, mib, ..] = &row[..] else {
                return None;
            };
            Some((
                index.parse().ok()?,
                number(percent).map(|x| x / 100.0),
                number(mib).map(|x| x * 1048576.0),
            ))
        };
        rows.into_iter().filter_map(gpu).collect()
    }
}

fn used() -> Option<Used> {
    let process = fs::read_to_string("/proc/self/stat").ok()?;
    // The name of the program, in parentheses, may hold anything.
    let (_, fields) = process.rsplit_once(')')?;
    let ticks = fields.split_whitespace().skip(11).take(2);
    let ticks: f64 = ticks.filter_map(|ticks| ticks.parse::<f64>().ok()).sum();
    let host = fs::read_to_string("/proc/stat").ok()?;
    let times = host.lines().next()?.split_whitespace().skip(1).take(8);
    let times: Vec<f64> = times.filter_map(|time| time.parse().ok()).collect();
    let all: f64 = times.iter().sum();
    // The fourth is idle time, the fifth the wait for disks.
    let idle: f64 = times.iter().skip(3).take(2).sum();
    Some(Used {
        at: Instant::now(),
        process: ticks / TICKS_PER_SECOND,
        host: (all - idle, all),
    })
}

/// The rate that Linux shows to programs, whatever its own clock does.
const TICKS_PER_SECOND: f64 = 100.0;
const SHORTEST: f64 = 0.1;
const LONGEST_ANSWER: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::RunHistory;
    use crate::run::Run;

    fn probe(nvidia_smi: &Path) -> Probe {
        Probe::new(nvidia_smi.to_owned())
    }

    #[cfg(unix)]
    fn script(folder: &Path, text: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let path = folder.join("nvidia-smi");
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_process_and_its_host_are_measured_at_both_ends_and_over_restarts() {
        let runs = tempfile::tempdir().unwrap();
        let run = Run::builder("a").runs_folder(runs.path()).start().unwrap();
        for _ in 0..2 {
            let none = probe(Path::new("/nowhere/nvidia-smi"));
            let sampler =
                SystemSampler::with_probe(run.folder(), 2, Duration::from_secs(60), none).unwrap();
            let since = Instant::now();
            while since.elapsed() < Duration::from_millis(300) {
                std::hint::spin_loop();
            }
            drop(sampler);
        }
        let system = RunHistory::read(run.folder()).unwrap().system;
        let values = |name: &str| -> Vec<f64> {
            let points = system[&2].get(name).into_iter().flatten();
            points.map(|point| point.value).collect()
        };
        assert_eq!(values("memory").len(), 4);
        assert!(values("memory").iter().all(|&x| x > 1e6), "{system:?}");
        assert_eq!(values("cpu").len(), 2);
        // The values depend on other processes.
        assert!(values("cpu").iter().all(|&x| x > 0.0), "{system:?}");
        assert!(
            values("host_cpu").iter().all(|x| (0.0..=1.0).contains(x)),
            "{system:?}"
        );
        assert!(values("host_memory").iter().all(|&x| x > 1e7));
        assert!(values("gpu0").is_empty());
    }

    #[cfg(unix)]
    #[test]
    fn gpus_are_measured_and_one_that_says_nothing_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let table = "echo '0, 25, 2'; echo '3, [N/A], 1024'; echo 'No devices'";
        let mut probe = probe(&script(folder.path(), table));
        let values = probe.measure();
        assert_eq!(values["gpu0"], Number(0.25));
        assert_eq!(values["gpu0_memory"], Number(2.0 * 1048576.0));
        assert_eq!(values["gpu3_memory"], Number(1073741824.0));
        assert!(!values.contains_key("gpu3"));
    }

    #[cfg(unix)]
    #[test]
    fn a_program_that_fails_or_hangs_is_asked_once() {
        let folder = tempfile::tempdir().unwrap();
        for (text, at_least) in [("exit 9", 0), ("exec sleep 600", 5)] {
            let mut probe = probe(&script(folder.path(), text));
            let since = Instant::now();
            assert!(probe.gpus().is_empty());
            assert!(since.elapsed().as_secs() >= at_least);
            let since = Instant::now();
            assert!(probe.gpus().is_empty());
            assert!(since.elapsed().as_secs() < 2);
        }
    }

    #[test]
    fn without_a_run_there_is_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let error = SystemSampler::start(folder.path(), 0, Duration::from_secs(1)).unwrap_err();
        assert!(error.is_not_found());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
