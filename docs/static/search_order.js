// Order of search results: guides and tutorials before the pages of the API, which mention most words.
var Scorer = {
  score: ([page, , , , score]) => score + (page.startsWith("docs/api/") ? -20 : page.startsWith("tutorials/") ? 5 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
