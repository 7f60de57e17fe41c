use std::path::Path;

use serde::Serialize;

use crate::error::Result;
use crate::records::JsonLines;

/// A log of the samples that each rank trained on in each step, one JSON object per line:
/// `{"rank":0,"step":1,"samples":[5,2,9]}`.
///
/// Several processes can write to the same file. Each empties it when it opens it, so all must have opened it before the
/// first one writes; any collective in between ensures that.
#[derive(Debug)]
pub struct SampleLog {
    file: Option<JsonLines>,
    rank: usize,
    step: usize,
}

#[derive(Serialize)]
struct Line<'a> {
    rank: usize,
    step: usize,
    samples: &'a [u64],
}

impl SampleLog {
    /// Empties or creates the file; without a path, logs nothing.
    ///
    /// # Errors
    ///
    /// [`Error::is_io`](crate::Error::is_io) if the file cannot be written.
    pub fn open(path: Option<&Path>, rank: usize) -> Result<Self> {
        Ok(Self {
            file: path.map(JsonLines::create).transpose()?,
            rank,
            step: 0,
        })
    }

    /// Logs the samples of the next step, beginning at step 1.
    ///
    /// # Errors
    ///
    /// [`Error::is_io`](crate::Error::is_io) if the file cannot be written.
    pub fn log(&mut self, samples: &[u64]) -> Result<()> {
        self.step += 1;
        let Some(file) = &mut self.file else {
            return Ok(());
        };
        file.write(&Line {
            rank: self.rank,
            step: self.step,
            samples,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_write_to_one_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("samples.jsonl");
        std::fs::write(&path, "old").unwrap();
        let mut ranks = [0, 1].map(|rank| SampleLog::open(Some(&path), rank).unwrap());
        ranks[0].log(&[3, 1]).unwrap();
        ranks[1].log(&[2, 0]).unwrap();
        ranks[0].log(&[4]).unwrap();
        let expected = "{\"rank\":0,\"step\":1,\"samples\":[3,1]}\n\
                        {\"rank\":1,\"step\":1,\"samples\":[2,0]}\n\
                        {\"rank\":0,\"step\":2,\"samples\":[4]}\n";
        assert_eq!(std::fs::read_to_string(&path).unwrap(), expected);
    }

    #[test]
    fn without_a_path_nothing_happens() {
        SampleLog::open(None, 0).unwrap().log(&[1]).unwrap();
    }
}
