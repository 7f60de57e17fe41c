//! Power cuts between any two steps.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::Folder;
use crate::checkpoint::VerifyLevel;
use crate::manifest::{Metadata, Role};
use crate::vfs::{Step, Vfs};

/// A disk that loses power before a step, and with it bytes and names that were not flushed.
struct Machine {
    left: usize,
    seed: u64,
    dirty: BTreeSet<PathBuf>,
    /// The names that are not flushed, in the order in which they changed.
    names: Vec<Change>,
    is_off: bool,
}

enum Change {
    Made(PathBuf),
    Renamed { from: PathBuf, to: PathBuf },
}

impl Machine {
    fn vfs(steps: usize, seed: u64) -> (Vfs, Arc<Mutex<Self>>) {
        let machine = Arc::new(Mutex::new(Self {
            left: steps,
            seed,
            dirty: BTreeSet::new(),
            names: Vec::new(),
            is_off: false,
        }));
        let inner = Arc::clone(&machine);
        (
            Vfs::hooked(move |step| inner.lock().unwrap().step(step)),
            machine,
        )
    }

    fn step(&mut self, step: &Step<'_>) -> io::Result<()> {
        let off = || Err(io::Error::other("the power is off"));
        if self.is_off {
            return off();
        }
        if self.left == 0 {
            self.is_off = true;
            if let Step::Remove(path) = step {
                lose_one(path);
            }
            self.lose();
            return off();
        }
        self.left -= 1;
        match *step {
            Step::MakeFolder(path) => self.names.push(Change::Made(path.into())),
            Step::Create(path) => {
                self.dirty.insert(path.into());
                self.names.push(Change::Made(path.into()));
            }
            Step::Write(path) => {
                self.dirty.insert(path.into());
            }
            Step::Sync(path) => {
                self.dirty.remove(path);
            }
            Step::SyncFolder(folder) => self.names.retain(|change| match change {
                Change::Made(path) => path.parent() != Some(folder),
                Change::Renamed { to, .. } => to.parent() != Some(folder),
            }),
            Step::Rename(from, to) => {
                self.follow(from, to);
                let (from, to) = (from.into(), to.into());
                self.names.push(Change::Renamed { from, to });
            }
            Step::Remove(path) => {
                self.dirty.retain(|x| !x.starts_with(path));
                self.names.retain(|change| match change {
                    Change::Made(x) => !x.starts_with(path),
                    Change::Renamed { .. } => true,
                });
            }
        }
        Ok(())
    }

    /// Moves everything known of a path to its new name.
    fn follow(&mut self, from: &Path, to: &Path) {
        let moved = |path: &PathBuf| match path.strip_prefix(from) {
            Ok(rest) if rest.as_os_str().is_empty() => to.to_owned(),
            Ok(rest) => to.join(rest),
            Err(_) => path.clone(),
        };
        self.dirty = self.dirty.iter().map(moved).collect();
        for change in &mut self.names {
            if let Change::Made(path) = change {
                *path = moved(path);
            }
        }
    }

    fn lose(&mut self) {
        for path in std::mem::take(&mut self.dirty) {
            if let Ok(metadata) = fs::metadata(&path) {
                let file = fs::File::options().write(true).open(&path).unwrap();
                file.set_len(self.draw(metadata.len() + 1)).unwrap();
            }
        }
        for change in std::mem::take(&mut self.names).into_iter().rev() {
            if self.draw(2) == 0 {
                continue;
            }
            match change {
                Change::Made(path) if path.is_dir() => drop(fs::remove_dir_all(path)),
                Change::Made(path) => drop(fs::remove_file(path)),
                // The file that a rename replaced is not restored, since `latest` is only a hint.
                Change::Renamed { from, to } => drop(fs::rename(to, from)),
            }
        }
    }

    /// Draws a number with SplitMix64.
    fn draw(&mut self, below: u64) -> u64 {
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.seed ^ (self.seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % below
    }
}

/// Removes the first entry, as a removal that is cut short does.
fn lose_one(path: &Path) {
    let first = fs::read_dir(path).ok().and_then(|mut x| x.next()?.ok());
    if let Some(entry) = first {
        let _ = fs::remove_file(entry.path());
    }
}

/// Returns a disk that is full in this step, counted from 0, and works in all others.
fn failing_once(step: i64) -> Vfs {
    let left = Mutex::new(step);
    Vfs::hooked(move |_| {
        let mut left = left.lock().unwrap();
        *left -= 1;
        if *left == -1 {
            Err(io::ErrorKind::StorageFull.into())
        } else {
            Ok(())
        }
    })
}

fn is_disk_full(error: &crate::Error) -> bool {
    error.to_string().contains("no storage space")
}

/// Saves four times, keeps two checkpoints, and returns the last number that a commit reported.
fn job(folder: &Folder) -> crate::Result<u64> {
    let mut saved = 0;
    for step in 1..=4 {
        match save(folder, step) {
            Ok(number) => saved = number,
            Err(_) => break,
        }
        if folder
            .prune(NonZeroUsize::new(2).unwrap(), VerifyLevel::Hashes, &[])
            .is_err()
        {
            break;
        }
    }
    Ok(saved)
}

fn save(folder: &Folder, step: u64) -> crate::Result<u64> {
    let mut draft = folder.begin(0)?;
    for (name, bytes) in content(step) {
        draft.write_bytes(&name.parse()?, Role::Other, &bytes)?;
    }
    let metadata = Metadata {
        step,
        ..Metadata::new(NonZeroUsize::MIN)
    };
    Ok(draft.commit(metadata)?.number())
}

/// Returns a folder in memory if the system has one, since hundreds of jobs would wait for the disk. `Machine` decides
/// which names and bytes survive a power cut.
fn folder_in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .unwrap()
}

fn content(step: u64) -> HashMap<&'static str, Vec<u8>> {
    let bytes = |len: u64| (0..len).map(|x| (x * 7 + step) as u8).collect();
    HashMap::from([
        ("model.bin", bytes(5000)),
        ("ranks/0.json", bytes(100)),
        ("empty", Vec::new()),
    ])
}

#[test]
fn a_power_cut_at_any_step_leaves_the_old_or_the_new_checkpoint() {
    let mut ends = 0;
    for steps in 0.. {
        let mut is_done = false;
        for seed in 0..3 {
            let temporary = folder_in_memory();
            let path = temporary.path().join("checkpoints/a");
            let (vfs, machine) = Machine::vfs(steps, seed);
            let made = Folder::create_on(vfs, path.clone());
            let told = made.as_ref().map_or(0, |folder| job(folder).unwrap());
            is_done = !machine.lock().unwrap().is_off;

            assert!(
                made.is_err() || path.is_dir(),
                "step {steps}, seed {seed}: the folder was made, and is gone"
            );
            let folder = Folder::create(&path).unwrap();
            let search = folder.latest_good().unwrap();
            let torn: Vec<_> = search.rejected.iter().map(ToString::to_string).collect();
            assert!(torn.is_empty(), "step {steps}, seed {seed}: {torn:?}");
            let found = search.found.as_ref().map_or(0, |x| x.number());
            assert!(
                (told..=told + 1).contains(&found),
                "step {steps}, seed {seed}: {told} was saved, {found} is found"
            );
            if let Some(checkpoint) = search.found {
                for (name, bytes) in content(found) {
                    assert_eq!(checkpoint.read(&name.parse().unwrap()).unwrap(), bytes);
                }
                assert_eq!(checkpoint.manifest().unwrap().metadata.step, found);
            }
            // All checkpoints with a name are complete, and the job can continue.
            for checkpoint in folder.checkpoints().unwrap() {
                let report = checkpoint.verify(VerifyLevel::Hashes);
                assert!(report.is_good(), "step {steps}, seed {seed}: {report}");
                assert!(report.untracked.is_empty());
            }
            assert_eq!(save(&folder, found + 1).unwrap(), found + 1);
            assert_eq!(folder.latest_hint(), Some(found + 1));
            ends += 1;
        }
        if is_done {
            break;
        }
    }
    // Four saves have about eighty steps.
    assert!(ends > 200, "{ends}");
}

#[test]
fn a_folder_whose_name_may_be_lost_is_not_left() {
    for failing in 0.. {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path().join("checkpoints/a");
        let made = Folder::create_on(failing_once(failing), path.clone());
        match made {
            Ok(_) => {
                // There are two levels, each made and flushed.
                assert_eq!(failing, 4);
                break;
            }
            Err(error) => assert!(is_disk_full(&error), "step {failing}: {error}"),
        }
        assert!(!path.exists(), "step {failing}");
        assert_eq!(path.parent().unwrap().exists(), failing > 1);
        Folder::create(&path).unwrap();
    }
}

#[test]
fn the_name_of_a_folder_that_another_process_made_is_flushed() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("a");
    let flushed = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&flushed);
    let vfs = Vfs::hooked(move |step| {
        match step {
            Step::MakeFolder(path) => fs::create_dir(path)?,
            Step::SyncFolder(path) => seen.lock().unwrap().push(path.to_path_buf()),
            _ => {}
        }
        Ok(())
    });
    Folder::create_on(vfs, path).unwrap();
    assert_eq!(*flushed.lock().unwrap(), [temporary.path()]);
}

#[test]
fn the_parent_of_a_lone_name_is_the_working_folder() {
    let name = format!("no-folder-{}", std::process::id());
    // The flush fails, so nothing is left where the test runs.
    let vfs = Vfs::hooked(|step| match step {
        Step::SyncFolder(path) => Err(io::Error::other(format!("flush {}", path.display()))),
        _ => Ok(()),
    });
    let error = Folder::create_on(vfs, PathBuf::from(&name)).unwrap_err();
    assert!(error.to_string().ends_with("flush ."), "{error}");
    assert!(!Path::new(&name).exists());
}

#[test]
fn an_error_at_any_step_removes_the_draft() {
    for failing in 0.. {
        let temporary = tempfile::tempdir().unwrap();
        save(&Folder::open(temporary.path()).unwrap(), 1).unwrap();
        let folder = Folder::open(temporary.path()).unwrap();
        let folder = folder.with_vfs(failing_once(failing));
        let result = save(&folder, 2);
        let clean = Folder::open(temporary.path()).unwrap();
        assert!(clean.unfinished().unwrap().is_empty(), "step {failing}");
        let found = clean.latest_good().unwrap().found.unwrap().number();
        match result {
            Ok(number) => {
                assert_eq!((number, found), (2, 2));
                if clean.latest_hint() == Some(2) {
                    break;
                }
            }
            Err(error) => {
                assert!(is_disk_full(&error), "step {failing}: {error}");
                assert!(
                    found == 1 || error.to_string().contains("is complete"),
                    "{error}"
                );
            }
        }
    }
}
