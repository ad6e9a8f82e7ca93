//! Stop strings, found across token boundaries.

/// Looks for stop strings in a text that comes in pieces, and holds back what may become one.
///
/// The match that ends first wins, so that the answer does not depend on how the text was cut.
#[derive(Clone, Debug, Default)]
pub(crate) struct StopScan {
    held: String,
    shows_stop: bool,
}

impl StopScan {
    /// With `shows_stop` the text ends after the stop string that was found, else before it.
    pub(crate) fn new(shows_stop: bool) -> Self {
        Self {
            held: String::new(),
            shows_stop,
        }
    }

    /// Takes the next piece and appends what can be shown. `Some` is the index of the stop string
    /// that was found.
    pub(crate) fn push(
        &mut self,
        stops: &[String],
        piece: &str,
        shown: &mut String,
    ) -> Option<usize> {
        if stops.is_empty() {
            shown.push_str(piece);
            return None;
        }
        self.held.push_str(piece);
        if let Some((stop, start)) = first_match(stops, &self.held) {
            let num_shown = start + usize::from(self.shows_stop) * stops[stop].len();
            shown.push_str(&self.held[..num_shown]);
            self.held.clear();
            return Some(stop);
        }
        let num_certain = self.held.len() - longest_beginning(stops, &self.held);
        shown.push_str(&self.held[..num_certain]);
        self.held.drain(..num_certain);
        None
    }

    /// No piece follows: what was held back is shown.
    pub(crate) fn finish(&mut self, shown: &mut String) {
        shown.push_str(&self.held);
        self.held.clear();
    }
}

/// The stop string whose first match ends first, and the start of the match; the longest of several.
fn first_match(stops: &[String], text: &str) -> Option<(usize, usize)> {
    let matches = stops.iter().enumerate().filter_map(|(index, stop)| {
        let start = text.find(stop.as_str())?;
        Some((start + stop.len(), start, index))
    });
    matches.min().map(|(_, start, index)| (index, start))
}

/// Bytes at the end of `text` that some stop string begins with.
fn longest_beginning(stops: &[String], text: &str) -> usize {
    let beginning = |stop: &String| {
        let longest = text.len().min(stop.len() - 1);
        (1..=longest)
            .rev()
            .find(|&length| text.as_bytes().ends_with(&stop.as_bytes()[..length]))
    };
    stops.iter().filter_map(beginning).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(stops: &[&str], pieces: &[&str]) -> (String, Option<usize>) {
        let stops: Vec<String> = stops.iter().map(ToString::to_string).collect();
        let mut scan = StopScan::default();
        let mut shown = String::new();
        for piece in pieces {
            if let Some(stop) = scan.push(&stops, piece, &mut shown) {
                return (shown, Some(stop));
            }
        }
        scan.finish(&mut shown);
        (shown, None)
    }

    #[test]
    fn a_stop_string_across_pieces_is_cut() {
        assert_eq!(scan(&["END"], &["a E", "N", "D b"]), ("a ".into(), Some(0)));
    }

    #[test]
    fn a_stop_string_is_shown_to_those_who_ask() {
        let mut scan = StopScan::new(true);
        let mut shown = String::new();
        assert_eq!(
            scan.push(&["END".to_owned()], "a END b", &mut shown),
            Some(0)
        );
        assert_eq!(shown, "a END");
    }

    #[test]
    fn a_beginning_that_comes_to_nothing_is_shown() {
        assert_eq!(scan(&["END"], &["a E", "N", "d"]), ("a ENd".into(), None));
        assert_eq!(scan(&["END"], &["a E", "N"]), ("a EN".into(), None));
    }

    #[test]
    fn a_beginning_within_a_beginning_is_kept() {
        assert_eq!(scan(&["aab"], &["a", "a", "a", "b"]), ("a".into(), Some(0)));
    }

    #[test]
    fn the_match_that_ends_first_wins() {
        assert_eq!(scan(&["abcd", "bc"], &["abcd"]), ("a".into(), Some(1)));
        assert_eq!(scan(&["abcd", "bc"], &["abc", "d"]), ("a".into(), Some(1)));
        assert_eq!(scan(&["bc", "abc"], &["abc"]), (String::new(), Some(1)));
    }

    #[test]
    fn what_is_held_ends_within_no_character() {
        let (shown, stop) = scan(&["é!"], &["caf", "é", "è"]);
        assert_eq!((shown.as_str(), stop), ("caféè", None));
    }
}
