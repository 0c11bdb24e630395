"""The words that the simulated model knows: its whole vocabulary besides bytes and letter chunks."""

# Order is part of the vocabulary: a word's place gives its token ids (tokenizer.py), so only ever append.
WORDS: tuple[str, ...] = tuple(
    """
    the of and to in is that for it as with on be at by this from or an are not was but if then when while which
    all each any some no one two both only more less most first last next same other new old long short high low
    file files path paths line lines code test tests error errors value values name names type types list lists
    string number index count size length width depth offset range start end begin stop open close read write
    call calls callee function method class object module package import export return returns raise catch
    branch merge commit patch change changes diff review issue bug fix fixed cause reason effect result results
    check checks verify assert expect expected actual wrong right true false none null empty full missing found
    search find replace insert delete remove append update create build compile run runs running exit wait sleep
    server client request response header body status token tokens prompt answer message messages user tool tools
    cache block blocks memory disk store load save copy move swap lock queue stack heap pool thread process event
    parse parser format encode decode input output stream buffer chunk frame packet socket port host address node
    config setting option flag default argument parameter schema field key keys table row column record entry
    version release origin directory folder root parent child tree leaf graph edge vertex loop cycle step
    look looks seems need needs should would could will can may must let make makes made use used using uses take
    takes give gives get gets set sets put puts keep keeps show shows tell know think see try tries go goes come
    before after during between inside outside above below under over again also still already never always often
    here there where why how what who now later soon once twice well very quite rather almost about around through
    simple clear exact small large fast slow safe broken stable strict local remote public private static dynamic
    python script shell command terminal window editor cursor screen button menu page link text word letter digit
    handler worker wrapper helper context session history turn state machine timer clock deadline timeout retry
    limit bound carry overflow underflow division zero colon comma quote bracket brace space newline indent
    syntax semantics grammar rule pattern match group escape regex filter map reduce sort order reverse shuffle
    because therefore however instead since until unless without within against toward across along behind beside
    assistant system
    """.split()  # noqa: SIM905 - a list literal of 400 words is hard to read
)
