//! Text without the white space around it.

/// Takes the white space from a text's beginning and end, while it is written in pieces.
#[derive(Debug)]
pub(super) struct Trimmed {
    /// White space that is shown if more follows.
    space: String,
    trims_start: bool,
    trims_end: bool,
}

impl Trimmed {
    pub(super) fn new(trims_start: bool, trims_end: bool) -> Self {
        Self {
            space: String::new(),
            trims_start,
            trims_end,
        }
    }

    /// From here on it is as it came.
    pub(super) fn end_trimming(&mut self) {
        self.trims_end = false;
    }

    pub(super) fn write(&mut self, piece: &str, show: &mut dyn FnMut(&str)) {
        let piece = match self.trims_start {
            true => piece.trim_start(),
            false => piece,
        };
        if piece.is_empty() {
            return;
        }
        let shown = match self.trims_end {
            true => piece.trim_end(),
            false => piece,
        };
        if !shown.is_empty() {
            self.trims_start = false;
            if !self.space.is_empty() {
                show(&self.space);
                self.space.clear();
            }
            show(shown);
        }
        self.space.push_str(&piece[shown.len()..]);
    }

    /// Something else follows: the white space between is dropped, behind it too.
    pub(super) fn cut(&mut self) {
        self.space.clear();
        self.trims_start = true;
    }

    /// Nothing follows.
    pub(super) fn finish(&mut self, show: &mut dyn FnMut(&str)) {
        if !self.space.is_empty() {
            show(&self.space);
            self.space.clear();
        }
    }
}
