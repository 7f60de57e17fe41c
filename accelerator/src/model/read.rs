use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Cursor, ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use accelerator_collective::Activity;
use burn::tensor::TensorData;
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde::Deserialize;

use super::write::FileNames;
use super::{FileLayout, dtype};
use crate::core::error::{Error, Kind, Result};

/// The most that a header may take, as in the format's own reader.
const MAX_HEADER: u64 = 100_000_000;

/// The bytes of a tensor that are read at a time.
const BLOCK: usize = 1 << 24;

/// A model on disk, in one file or in several with an index, or a file of one in memory. Headers are read and checked when
/// it is opened, values when they are asked for.
#[derive(Debug)]
pub(crate) struct ModelFile {
    activity: Activity,
    path: PathBuf,
    files: Vec<(PathBuf, FileBytes)>,
    tensors: BTreeMap<String, StoredTensor>,
    metadata: HashMap<String, String>,
}

/// A tensor in a file.
#[derive(Clone, Debug)]
pub(super) struct StoredTensor {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    file: usize,
    offset: u64,
    bytes: usize,
}

/// Where the bytes of a file lie.
#[derive(Debug)]
enum FileBytes {
    Disk(File),
    Memory(Arc<Vec<u8>>),
}

trait ReadSeek: Read + Seek {}

impl<T: Read + Seek> ReadSeek for T {}

impl FileBytes {
    fn reader(&self) -> Box<dyn ReadSeek + '_> {
        match self {
            Self::Disk(file) => Box::new(file),
            Self::Memory(bytes) => Box::new(Cursor::new(&bytes[..])),
        }
    }
}

#[derive(Deserialize)]
struct FileIndex {
    weight_map: BTreeMap<String, String>,
}

impl ModelFile {
    /// Opens `path`: a file, an index, or a folder with `model.safetensors` or its index. Where
    /// there is no such file but its index, that is opened.
    /// Reading it shows `activity`.
    pub(crate) fn open(path: &Path, activity: Activity) -> Result<Self> {
        let path = find(path)?;
        let mut model = Self::new(path.clone(), activity);
        if path
            .extension()
            .is_some_and(|extension| extension == "json")
        {
            model.add_index(&path)?;
        } else {
            model.open_file(path)?;
        }
        Ok(model)
    }

    /// A file that lies in memory; errors call it `path`.
    pub(crate) fn in_memory(
        path: PathBuf,
        bytes: Arc<Vec<u8>>,
        activity: Activity,
    ) -> Result<Self> {
        let mut model = Self::new(path.clone(), activity);
        model.add_file(path, FileBytes::Memory(bytes))?;
        Ok(model)
    }

    fn new(path: PathBuf, activity: Activity) -> Self {
        Self {
            activity,
            path,
            files: Vec::new(),
            tensors: BTreeMap::new(),
            metadata: HashMap::new(),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The tensor of that name. A name that is another one of a tied parameter finds it too.
    pub(super) fn find(&self, name: &str) -> Option<(&str, &StoredTensor)> {
        let found = self.tensors.get_key_value(name).or_else(|| {
            let kept = self.metadata.get(name)?;
            self.tensors.get_key_value(kept)
        });
        found.map(|(name, stored)| (name.as_str(), stored))
    }

    /// The layout that the file says it has.
    pub(super) fn layout(&self) -> Option<FileLayout> {
        FileLayout::from_name(self.metadata.get("layout")?)
    }

    pub(super) fn read(&self, stored: &StoredTensor) -> Result<TensorData> {
        let (path, file) = &self.files[stored.file];
        let dtype = dtype::from_file(stored.dtype)
            .ok_or_else(|| malformed(path, format!("Burn has no tensors of {:?}", stored.dtype)))?;
        let mut bytes = vec![0; stored.bytes];
        let mut file = file.reader();
        file.seek(SeekFrom::Start(stored.offset))
            .and_then(|_| {
                bytes.chunks_mut(BLOCK).try_for_each(|block| {
                    self.activity.keep_alive();
                    file.read_exact(block)
                })
            })
            .map_err(|error| Error::io("read the model file", path, error))?;
        Ok(TensorData::from_bytes_vec(
            bytes,
            stored.shape.clone(),
            dtype,
        ))
    }

    fn add_index(&mut self, path: &Path) -> Result<()> {
        let text = std::fs::read(path)
            .map_err(|error| Error::io("read the model's index", path, error))?;
        let index: FileIndex = serde_json::from_slice(&text)
            .map_err(|error| malformed(path, format!("it is not an index of shards: {error}")))?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let mut shards: Vec<&str> = index.weight_map.values().map(String::as_str).collect();
        shards.sort_unstable();
        shards.dedup();
        for shard in &shards {
            if Path::new(shard).file_name() != Some(shard.as_ref()) {
                return Err(malformed(
                    path,
                    format!("it names the shard {shard:?}; expected the name of a file beside it"),
                ));
            }
            self.open_file(folder.join(shard))?;
        }
        for (name, shard) in &index.weight_map {
            let place = self.tensors.get(name).map(|stored| shards[stored.file]);
            if place != Some(shard.as_str()) {
                return Err(malformed(
                    path,
                    format!("it has `{name}` in the shard `{shard}`, which has not"),
                ));
            }
        }
        Ok(())
    }

    fn open_file(&mut self, path: PathBuf) -> Result<()> {
        let file =
            File::open(&path).map_err(|error| Error::io("open the model file", &path, error))?;
        self.add_file(path, FileBytes::Disk(file))
    }

    fn add_file(&mut self, path: PathBuf, file: FileBytes) -> Result<()> {
        let (start, metadata) = read_header(&path, &mut *file.reader())?;
        let number = self.files.len();
        for (name, info) in metadata.tensors() {
            let (from, to) = info.data_offsets;
            let stored = StoredTensor {
                dtype: info.dtype,
                shape: info.shape.clone(),
                file: number,
                offset: start + from as u64,
                bytes: to - from,
            };
            if self.tensors.insert(name.clone(), stored).is_some() {
                return Err(malformed(
                    &path,
                    format!("it has `{name}`, as another shard has"),
                ));
            }
        }
        self.metadata
            .extend(metadata.metadata().clone().unwrap_or_default());
        self.files.push((path, file));
        Ok(())
    }
}

/// The file to open for what the caller named.
fn find(path: &Path) -> Result<PathBuf> {
    let asked = if path.is_dir() {
        path.join("model.safetensors")
    } else {
        path.to_owned()
    };
    if asked.exists() {
        return Ok(asked);
    }
    let name = asked.file_name().unwrap_or_default().to_string_lossy();
    let index = asked.with_file_name(FileNames::new(&name).index());
    if index.exists() {
        return Ok(index);
    }
    let missing = std::io::Error::new(
        ErrorKind::NotFound,
        format!("there is no such file, and no index `{}`", index.display()),
    );
    Err(Error::io("open the model file", &asked, missing))
}

/// The file, where its data begins, and what it says about them, checked against its length.
fn read_header(path: &Path, file: &mut dyn ReadSeek) -> Result<(u64, Metadata)> {
    let unreadable = |error| Error::io("read the model file", path, error);
    let length = file.seek(SeekFrom::End(0)).map_err(unreadable)?;
    file.rewind().map_err(unreadable)?;
    let mut size = [0; 8];
    if length < 8 {
        return Err(malformed(
            path,
            format!("it has {length} bytes, and a safetensors file at least 8"),
        ));
    }
    file.read_exact(&mut size).map_err(unreadable)?;
    let size = u64::from_le_bytes(size);
    if size > MAX_HEADER.min(length - 8) {
        return Err(malformed(
            path,
            format!("it announces a header of {size} bytes, and has {length} bytes in all"),
        ));
    }
    let mut header = vec![0; size as usize];
    file.read_exact(&mut header).map_err(unreadable)?;
    let metadata: Metadata = serde_json::from_slice(&header)
        .map_err(|error| malformed(path, format!("its header is not valid: {error}")))?;
    let start = 8 + size;
    let expected = start.saturating_add(metadata.data_len() as u64);
    if expected != length {
        return Err(malformed(
            path,
            format!(
                "its header accounts for {expected} bytes, and it has {length}: it is cut off, or not whole"
            ),
        ));
    }
    Ok((start, metadata))
}

fn malformed(path: &Path, what: String) -> Error {
    Error::with_source(
        Kind::Io,
        format!("cannot read the model file `{}`", path.display()),
        what,
    )
}
