use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use accelerator_collective::Activity;
use accelerator_host::fs::{Durability, folder_of, place, sync_folder};
use accelerator_host::lock::{FileLock, LockMode};
use accelerator_manifest::internal::StagedFolder;
use burn::module::ParamId;

use super::format::{ADAPTER_FILE, FileLayout, FileNames, FilePath, SaveOptions};
use super::peft::{CONFIG_FILE, PeftExport};
use super::snapshot::ModelSnapshot;
use crate::context::Context;
use crate::core::dyn_module::DynModule;
use crate::core::error::{Error, Result};

/// Writes the model on rank 0, and returns its result on all ranks. `trained` are the trained parameters, if they are known.
#[track_caller]
pub(crate) fn save(
    context: &Context,
    model: &dyn DynModule,
    path: &Path,
    options: &SaveOptions,
    trained: Option<&HashSet<ParamId>>,
) -> Result<()> {
    let activity = context.group().activity();
    let adapters = match options.layout {
        FileLayout::Peft if path.file_name() != Some(OsStr::new(ADAPTER_FILE)) => {
            return Err(Error::config(format!(
                "PEFT does not find `{}`: name the file `{ADAPTER_FILE}`",
                path.display()
            )));
        }
        FileLayout::Peft if options.max_shard_size.is_some() => {
            return Err(Error::config(
                "PEFT reads adapters from one file: leave `with_max_shard_size` out",
            ));
        }
        FileLayout::Peft => Some(PeftExport::of(model, trained)?),
        FileLayout::Burn | FileLayout::PyTorch => None,
    };
    let wanted = |place: &FilePath| adapters.as_ref().is_none_or(|adapters| adapters.has(place));
    let snapshot = ModelSnapshot::gathered_parts(context.group(), model, &wanted)?;
    let work = || match &snapshot {
        Some(snapshot) => write(snapshot, adapters.as_ref(), path, options, activity),
        None => Ok(()),
    };
    context.on_main("save the model", work).map(drop)
}

fn write(
    snapshot: &ModelSnapshot,
    adapters: Option<&PeftExport>,
    path: &Path,
    options: &SaveOptions,
    activity: Activity,
) -> Result<()> {
    let failed = |error| Error::io("write the model to", path, error);
    let target = target(path, options).map_err(failed)?;
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    let names = FileNames::new(&name);
    let folder = folder_of(&target).to_owned();
    let mut staged = Staged::new(folder, names.clone(), activity).map_err(failed)?;
    snapshot.write(&names, options, &mut |name, emit| {
        staged.write(name, emit).map_err(failed)
    })?;
    if let Some(adapters) = adapters {
        let config = adapters.config().map_err(|error| failed(error.into()))?;
        staged
            .write(CONFIG_FILE, &mut |file| file.write_all(&config))
            .map_err(failed)?;
    }
    staged.publish().map_err(failed)
}

/// Returns the path to write to. A symbolic link stays and its target is replaced, but not if there may
/// be several files, which are looked for beside the link. Anything that is not a regular file is
/// refused.
fn target(path: &Path, options: &SaveOptions) -> io::Result<PathBuf> {
    let is_alone = options.max_shard_size.is_none() && options.layout != FileLayout::Peft;
    match std::fs::metadata(path) {
        Ok(found) if !found.is_file() => {
            Err(io::Error::other("it is there and not a regular file"))
        }
        Ok(_) if is_alone => path.canonicalize(),
        Ok(_) | Err(_) => Ok(path.to_owned()),
    }
}

/// The files of a model that are written and not yet in their places.
///
/// They lie in a hidden folder beside them, so that renaming is atomic, which no other writer has: two that
/// save under one name at the same time write files of their own, and the model of the one that is done last
/// stays. What a dead process left is removed by the next save under the same name on that host, and a day
/// later on others.
struct Staged {
    folder: PathBuf,
    names: FileNames,
    hidden: StagedFolder,
    files: Vec<String>,
    activity: Activity,
}

impl Staged {
    /// Makes the hidden folder, and removes those of dead processes that wrote under this name.
    fn new(folder: PathBuf, names: FileNames, activity: Activity) -> io::Result<Self> {
        let is_ours = |target: &str| names.has(target);
        let hidden = StagedFolder::create(&folder, &names.single, is_ours)?;
        Ok(Self {
            folder,
            names,
            hidden,
            files: Vec::new(),
            activity,
        })
    }

    fn write(
        &mut self,
        name: &str,
        emit: &mut dyn FnMut(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut file = ProgressFile {
            file: File::create_new(self.hidden.path().join(name))?,
            activity: &self.activity,
            unflushed: 0,
        };
        self.files.push(name.to_owned());
        emit(&mut file)?;
        file.flush_to_disk()
    }

    /// Puts every file in its place, the index last, and removes what older saves under this name have left.
    /// If shards or adapters of an older save are replaced, their index or configuration goes first: none may ever speak
    /// of files of two saves.
    fn publish(self) -> io::Result<()> {
        let _turn = wait_for_turn(&self.folder);
        let written = &self.files;
        let replaces = |name: &String| self.names.is_shard(name) && self.folder.join(name).exists();
        if written.len() > 1 && written.iter().any(replaces) {
            remove_if_there(&self.folder.join(self.names.index()))?;
        }
        if written.iter().any(|name| name == CONFIG_FILE) {
            remove_if_there(&self.folder.join(CONFIG_FILE))?;
        }
        for name in written {
            let staged = self.hidden.path().join(name);
            place(&staged, &self.folder.join(name), Durability::Cached)?;
        }
        // Once for all of them, and best effort.
        let _ = sync_folder(&self.folder);
        // What is left no longer counts: a file is read before an index, and an index names its shards.
        self.remove_older();
        Ok(())
    }

    fn remove_older(&self) {
        let Ok(files) = std::fs::read_dir(&self.folder) else {
            return;
        };
        for file in files.flatten() {
            let name = file.file_name();
            let name = name.to_string_lossy();
            if self.names.has(&name)
                && !self.files.iter().any(|written| *written == name)
                && let Err(error) = remove_if_there(&file.path())
            {
                let path = file.path();
                tracing::warn!(path = %path.display(), %error, "an older model file is left");
            }
        }
    }
}

/// A file that shows, while it is written, that the save is alive.
struct ProgressFile<'a> {
    file: File,
    activity: &'a Activity,
    /// The bytes since it was flushed to the disk last.
    unflushed: usize,
}

impl ProgressFile<'_> {
    fn flush_to_disk(&mut self) -> io::Result<()> {
        self.unflushed = 0;
        self.file.sync_all()?;
        self.activity.keep_alive();
        Ok(())
    }
}

impl Write for ProgressFile<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // The caller passes the rest again.
        let written = self.file.write(&bytes[..bytes.len().min(BLOCK)])?;
        self.activity.keep_alive();
        self.unflushed += written;
        if self.unflushed >= FLUSHED {
            // One flush of all of a large file would show nothing for long.
            self.flush_to_disk()?;
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

const BLOCK: usize = 1 << 20;

const FLUSHED: usize = 1 << 30;

/// Waits until this writer may put its files in their places. Only one may at a time: shards of two saves must not be
/// mixed. Best effort: not every file system has locks, and a writer that is stopped meanwhile must not block others
/// for ever.
fn wait_for_turn(folder: &Path) -> Option<FileLock> {
    let turn = FileLock::open(folder, LockMode::Exclusive, LOCK_TIMEOUT).ok()?;
    if turn.is_none() {
        let folder = folder.display();
        tracing::warn!(%folder, "another process keeps the folder locked; saving all the same");
    }
    turn
}

/// Renaming takes far less; only a writer that does not run takes longer.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

fn remove_if_there(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use accelerator_collective::ProcessGroup;

    use super::*;

    fn staged(folder: &Path) -> Staged {
        let activity = ProcessGroup::single().activity();
        let names = FileNames::new("model.safetensors");
        Staged::new(folder.to_owned(), names, activity).unwrap()
    }

    /// The files, not what is in hidden folders.
    fn files(folder: &Path) -> Vec<(String, String)> {
        let entries = folder.read_dir().unwrap().map(|entry| entry.unwrap());
        let mut files: Vec<_> = entries
            .filter(|entry| entry.path().is_file())
            .map(|entry| {
                let text = std::fs::read_to_string(entry.path()).unwrap();
                (entry.file_name().into_string().unwrap(), text)
            })
            .collect();
        files.sort();
        files
    }

    fn shard(number: usize) -> String {
        FileNames::new("model.safetensors").shard(number, 2)
    }

    /// Saves two shards and an index that say who wrote them.
    fn save(folder: &Path, who: &str) -> io::Result<()> {
        let mut staged = staged(folder);
        for name in [
            shard(1),
            shard(2),
            "model.safetensors.index.json".to_owned(),
        ] {
            staged.write(&name, &mut |file| file.write_all(who.as_bytes()))?;
        }
        staged.publish()
    }

    #[test]
    fn who_saves_while_another_one_writes_disturbs_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let mut slow = staged(folder);
        slow.write("model.safetensors", &mut |file| {
            file.write_all(b"slow, ")?;
            // Another job, from its beginning to its end.
            let mut quick = staged(folder);
            quick.write("model.safetensors", &mut |file| file.write_all(b"quick"))?;
            quick.publish()?;
            file.write_all(b"and whole")
        })
        .unwrap();
        let own = |text: &str| ("model.safetensors".to_owned(), text.to_owned());
        assert!(files(folder).contains(&own("quick")));
        slow.publish().unwrap();
        assert_eq!(files(folder), [own("slow, and whole")]);
        assert_eq!(folder.read_dir().unwrap().count(), 1);
    }

    /// Each save is whole when it is done, whoever else saves.
    #[test]
    fn shards_of_two_writers_are_never_mixed() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        std::thread::scope(|scope| {
            for who in ["one", "two"] {
                scope.spawn(move || (0..50).for_each(|_| save(folder, who).unwrap()));
            }
        });
        let files = files(folder);
        let names: Vec<_> = files.iter().map(|(name, _)| name.clone()).collect();
        let expected = [
            shard(1),
            shard(2),
            "model.safetensors.index.json".to_owned(),
        ];
        assert_eq!(names, expected);
        assert!(files.iter().all(|(_, who)| *who == files[0].1), "{files:?}");
    }

    #[test]
    fn a_write_that_fails_leaves_the_older_save_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        save(folder, "old").unwrap();
        let before = files(folder);
        let mut new = staged(folder);
        new.write(&shard(1), &mut |file| file.write_all(b"new"))
            .unwrap();
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        let error = new.write(&shard(2), &mut |_| Err(full())).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        drop(new);
        assert_eq!(files(folder), before);
        assert_eq!(folder.read_dir().unwrap().count(), before.len());
    }

    #[test]
    fn what_dead_writers_of_this_model_left_goes() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        // As a process of this host leaves it: without the lock of one that lives.
        let dead = |target: &str| {
            let staged = StagedFolder::create(folder, target, |_| false).unwrap();
            let path = staged.path().to_owned();
            drop(staged);
            std::fs::create_dir(&path).unwrap();
            std::fs::write(path.join("half"), "half").unwrap();
            path
        };
        let living = staged(folder);
        let stranger = folder.join(".model.safetensors.partial");
        std::fs::write(&stranger, "half").unwrap();
        let kept = [
            dead("other.safetensors"),
            dead("model-final.safetensors"),
            living.hidden.path().to_owned(),
            stranger,
        ];
        let gone = [dead("model.safetensors"), dead(&shard(7))];
        drop(staged(folder));
        for path in &kept {
            assert!(path.exists(), "{}", path.display());
        }
        for path in &gone {
            assert!(!path.exists(), "{}", path.display());
        }
    }
}
