from veca._util.html import Page


def test_page_escapes_and_is_written_whole(tmp_path):
    page = Page("a < b")
    page.heading("h & h")
    page.text('say "x"', "note")
    page.table(["n"], [["<1>"]])
    page.picture('p".png', "alt")
    text = page.write(tmp_path / "new" / "page.html").read_text()
    assert "<title>a &lt; b</title>" in text and "<td>&lt;1&gt;</td>" in text
    assert 'src="p&quot;.png"' in text and '<p class="note">' in text
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["page.html"]
